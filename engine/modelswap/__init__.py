"""What trainers use: :mod:`modelswap.publish` puts versions where pods fetch them from, and waits until they serve."""
