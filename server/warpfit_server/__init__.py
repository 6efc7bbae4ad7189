"""The warpfit server: what a GPU node installs (``pip install 'warpfit[server]'``)."""
