"""Changes of single elements between two versions: packs that are built, read, chosen among and applied.

After a fine-tune nearly every tensor is another, and few of its elements are. No torch, no network, no folder layout:
bytes come and go through callables. ``coding`` is one block, ``layout`` a pack's header, ``pack`` reads and applies,
``build`` writes, ``folder`` makes a whole checkpoint, ``plan`` chooses among packs.
"""
