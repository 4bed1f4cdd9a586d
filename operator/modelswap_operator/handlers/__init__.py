"""kopf: watching, and nothing else. No handler decides, patches or waits; it wakes the task of an object."""
