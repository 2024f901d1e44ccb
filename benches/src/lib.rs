//! This package has no code of its own. It holds the benchmarks in `benches/`, one file for each
//! topic. `cargo bench -p benches` runs them all, `cargo bench -p benches --bench memory` one.
