"""The public API `tandem.v1`, and metadata of its calls."""

# Metadata of `Generate`, where requests are split between applications: to the client, which one answers;
# from a client that resumes a stream, which one began it.
APPLICATION_KEY = "tandem-application"
# Metadata of a relayed call: the names of the caller's certificate, which the relaying gateway vouches for.
RELAYED_CERTIFICATE_KEY = "tandem-relayed-certificate"
