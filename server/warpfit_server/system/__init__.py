"""The operating system's side: processors, memory, files, threads, the compile cache."""
