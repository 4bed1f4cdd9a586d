"""Pictures of what differs between two checkpoints; nothing here reads one."""
