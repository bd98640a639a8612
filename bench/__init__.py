"""Benchmarks: `./run bench NAME`. Each bench is a module here with a `main(argv)`."""
