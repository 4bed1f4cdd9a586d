# A real S3 server (versitygw over a folder) for the demo and for tests on a cluster; hack/servers builds it. Nothing of
# modelswap is in it, and it is no part of an installation.
FROM scratch
COPY versitygw /versitygw
USER 65532:65532
ENTRYPOINT ["/versitygw"]
