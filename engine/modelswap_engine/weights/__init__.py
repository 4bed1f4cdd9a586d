"""The torch-side core of a swap, for any ``nn.Module``.

It reads checkpoint tensors, builds runtime tensors beside the live ones, makes them live by changing pointers, proves
what is live and puts the old ones back. It refuses to know any engine, process or network: how parameters are made of
checkpoint tensors comes in as a :class:`~modelswap_engine.weights.mapping.Loader`, so that the same code runs inside
every engine's own worker.
"""
