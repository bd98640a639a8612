"""What `./run bench engine` is made of: loads, systems, floors, files of random weights, quality and the soak."""
