"""``oci://``: models as artifacts of an OCI registry."""
