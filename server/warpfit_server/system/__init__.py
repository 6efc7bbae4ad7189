"""What the operating system gives: processors, memory, files, threads, and the lack of them."""
