"""Publishing versions: what to upload is decided purely, sent file by file, and shown by the manifest, last."""
