use pyo3::prelude::*;

/// Counts of bytes landed, lent and copied.
///
/// Attributes:
///     bytes_landed: Bytes that the server wrote into registered buffers itself.
///     bytes_lent: Bytes that the device sent from registered buffers.
///     bytes_copied: Bytes that this side copied, in either direction.
#[pyclass(frozen, eq, get_all, module = "valkey_rdma")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    bytes_landed: u64,
    bytes_lent: u64,
    bytes_copied: u64,
}

#[pymethods]
impl Counts {
    fn __repr__(&self) -> String {
        let Self { bytes_landed, bytes_lent, bytes_copied } = self;
        format!("Counts(bytes_landed={bytes_landed}, bytes_lent={bytes_lent}, bytes_copied={bytes_copied})")
    }
}

impl From<rdma_kv::Counts> for Counts {
    fn from(counts: rdma_kv::Counts) -> Self {
        Self {
            bytes_landed: counts.bytes_landed,
            bytes_lent: counts.bytes_lent,
            bytes_copied: counts.bytes_copied,
        }
    }
}
