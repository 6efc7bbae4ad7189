"""What the operating system provides: processors, memory, files, threads, the compile cache."""
