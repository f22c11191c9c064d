"""The public API `tandem.v1`: messages and stubs generated from `tandem.proto`, and metadata of its calls."""

# Metadata of `Generate`, where requests are split between applications: to the client, which one answers;
# from a client that resumes a stream, which one began it.
APPLICATION_KEY = "tandem-application"
