"""What the benches of the semantic cache share: vectors on disk, the played verifier, streams and their rows."""
