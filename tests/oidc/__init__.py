"""Sign-in at a real OpenID provider."""
