# syntax=docker/dockerfile:1
#
# docker build -t warpfit .                              the CPU engine
# docker build -t warpfit:cuda --build-arg VARIANT=cuda13 .   a GPU; the driver comes from the host
#
# Every dependency is a wheel, locked with its hash by deploy/requirements/lock: nothing is compiled
# here. deploy/README.md says how to run it.

# The index of all platforms as docker-library/repo-info lists it, of 19 September 2026 (3.11.16).
ARG PYTHON=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${PYTHON} AS build
# server, cuda12 or cuda13: an extra of pyproject.toml
ARG VARIANT=server
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY deploy/requirements deploy/requirements
RUN python -m venv --without-pip /opt/warpfit \
    && python -m pip --python /opt/warpfit/bin/python install --only-binary :all: \
        --require-hashes --requirement "deploy/requirements/${VARIANT}.txt"
RUN python -m venv --without-pip /opt/build \
    && python -m pip --python /opt/build/bin/python install --only-binary :all: \
        --require-hashes --requirement deploy/requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY client/warpfit client/warpfit
COPY client/warpfit_command.py client/
COPY server/warpfit_server server/warpfit_server
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /wheels \
    && python -m pip --python /opt/warpfit/bin/python install --no-index --no-deps /wheels/*.whl

FROM ${PYTHON}
LABEL org.opencontainers.image.title="warpfit" \
      org.opencontainers.image.description="Expression evaluation for symbolic regression, as a gRPC service" \
      org.opencontainers.image.licenses="BSD-3-Clause"
# Compiled code is kept in a volume.
RUN install -d -o 10001 -g 10001 -m 0700 /var/cache/warpfit
COPY --from=build /opt/warpfit /opt/warpfit
ENV PATH=/opt/warpfit/bin:${PATH} \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    WARPFIT_CACHE_DIR=/var/cache/warpfit \
    WARPFIT_HOST=0.0.0.0 \
    WARPFIT_PORT=50551 \
    WARPFIT_HEALTH_PORT=50552 \
    WARPFIT_METRICS_PORT=9464 \
    WARPFIT_LOG_FORMAT=json
USER 10001:10001
# What a new volume holds already. Another processor, and a GPU that is not named, compile their own
# at their first start.
ARG VARIANT=server
ARG ARCHITECTURES=80,86,89,90,100,120
RUN if [ "${VARIANT}" = server ]; then warpfit precompile; \
    else warpfit precompile --engine cuda --architectures "${ARCHITECTURES}"; fi
VOLUME /var/cache/warpfit
EXPOSE 50551 50552 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s \
    CMD ["warpfit", "health", "127.0.0.1:50552"]
ENTRYPOINT ["warpfit"]
CMD ["serve"]
