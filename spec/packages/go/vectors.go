// Package vectors holds the test vectors of Valkey over RDMA as data: what control messages mean, and what a connection does when.
// vectors/README.md tells how to read them.
package vectors

import "embed"

// Version of the vectors, FORMAT.NEW.MENDED.
const Version = "@VERSION@"

// Files are vectors/control/*.json, vectors/trace/*.json, vectors/schema/*.json and vectors/README.md.
//
//go:embed vectors
var Files embed.FS
