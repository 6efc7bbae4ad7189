"""The engine process: loop, scheduler, fits, and the engines that evaluate batches.

The engines (`cpu`, `cuda`) know nothing of sockets, messages, tenants or gRPC.
"""
