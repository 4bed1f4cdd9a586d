"""The swap transaction: what moves running weights from one version to another, or back.

It knows the backend port, the source port and the wire types. It refuses to know any engine, torch, HTTP or Kubernetes.
"""
