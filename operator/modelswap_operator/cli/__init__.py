"""``kubectl modelswap``: what a person does to slots, by kubectl and control ports; nothing of the operator inside."""
