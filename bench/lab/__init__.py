"""What benches are made of: the compiled load tool and upstream, processes and what they cost, scenarios, rows and tables."""
