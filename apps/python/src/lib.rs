//! The native module of the Python package `valkey_rdma`: `rdma-kv` on memory of Python objects.
#![deny(unsafe_code)]

mod address;
mod arguments;
mod client;
mod counts;
mod embedded;
mod errors;
mod link;
#[allow(unsafe_code, reason = "the memory of Python objects")]
mod memory;
mod server;
mod wire;

/// Large values in Valkey over RDMA, received into and sent from buffers of Python.
#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::counts::Counts;

    /// Serve the store `embedded://NAME` over TCP as well, at a free port of the loopback.
    ///
    /// It is served until the process ends.
    ///
    /// Returns:
    ///     The address for `Client`: `tcp://127.0.0.1:PORT`.
    #[pyfunction]
    fn serve_embedded(py: Python<'_>, name: &str) -> PyResult<String> {
        let address = py.detach(|| crate::embedded::serve_tcp(name)).map_err(crate::errors::Failure::Connect);
        address.map(|address| format!("tcp://{address}")).map_err(|failure| failure.raised(py, "embedded://"))
    }

    /// How many forks there were between the process that imported this module and this one.
    #[pyfunction]
    fn forks() -> u32 {
        rdma_process::forks()
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        rdma_process::forks();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
