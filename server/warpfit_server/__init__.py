"""The warpfit server: what a GPU node installs (``pip install '.[server]'``)."""
