"""The process: settings, leader election, the tasks of the objects, probes, metrics, logs."""
