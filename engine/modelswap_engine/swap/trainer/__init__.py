"""What a trainer does with an engine: weights that come in beside any version that can be found, and that go out."""
