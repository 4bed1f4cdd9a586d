"""Who vouches for a version: signatures of manifests, by OpenSSF model signing.

It knows bytes of manifests and signatures, keys and certificates; no folder, no swap, no policy but "by one of these".
The package that does the work is imported when it is needed (extra ``signing``).
"""
