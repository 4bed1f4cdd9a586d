"""What a newcomer runs: the demo model, a load generator, the quickstart and the demo on a cluster."""
