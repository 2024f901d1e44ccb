//! Memory of Python objects, and several pieces of it as one buffer.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

/// The bytes of a Python object with the buffer protocol. While a clone exists, the object is alive
/// and cannot move them: resizing a `bytearray` and closing an `mmap` raise `BufferError`.
#[derive(Clone)]
pub(crate) struct Memory(Arc<PyUntypedBuffer>);

impl Memory {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        // A memoryview computes the strides for exporters without them, such as ctypes.
        let view = PyUntypedBuffer::get(PyMemoryView::from(object)?.as_any())?;
        if !view.is_c_contiguous() {
            return Err(PyBufferError::new_err("the bytes of the buffer are not contiguous"));
        }
        Ok(Self(Arc::new(view)))
    }

    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let memory = Self::of(object)?;
        if memory.0.readonly() {
            return Err(PyBufferError::new_err("the buffer is read-only, and a value is received into it"));
        }
        Ok(memory)
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.0.buf_ptr().cast()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len_bytes()
    }

    pub(crate) fn to_register(&self) -> rdma_kv::Memory {
        // SAFETY: the exporter keeps the bytes in place, readable and (by `writable`) writable,
        // until PyBuffer_Release (Python/C API, "Buffer Protocol"). That is when the clone beside
        // them is dropped. No Rust code has references to the bytes: `read` and `write` copy from
        // and to their address. Memory that `writable` did not check is only read, by `send` over
        // TCP, or `new_bytes` has made it and no Python code has seen it yet. Python code may
        // access the bytes, too, by the rules of `Client.register`: it changes none while a command
        // uses them, and registers a buffer with one server only.
        unsafe { rdma_kv::Memory::from_raw_parts(self.start(), self.len(), self.clone()) }
    }

    pub(crate) fn at(&self, range: &Range<usize>) -> Option<*mut u8> {
        let inside = range.start <= range.end && range.end <= self.len();
        inside.then(|| self.start().wrapping_add(range.start))
    }

    /// Copies `into.len()` bytes from `offset` on. False, without a copy, if there are fewer.
    #[must_use]
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let Some(from) = offset.checked_add(into.len()).and_then(|end| self.at(&(offset..end))) else {
            return false;
        };
        // SAFETY: `at` has checked the range, and the exporter keeps the bytes in place until
        // PyBuffer_Release (Python/C API, "Buffer Protocol"). `into` is Rust's own memory, so they
        // do not overlap. The caller of the Python method promises that no other thread changes the
        // bytes meanwhile, as for `socket.send`.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        true
    }

    #[must_use]
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(into) = offset.checked_add(from.len()).and_then(|end| self.at(&(offset..end))) else {
            return false;
        };
        // SAFETY: as in `read`. The bytes are writable: `writable` has checked the memory, or
        // `new_bytes` has made it and no Python code has seen it yet.
        unsafe { into.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        true
    }
}

/// Returns new `bytes` of this length, with undefined contents, and their memory.
pub(crate) fn new_bytes(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyBytes>, Memory)> {
    let too_long = |_| PyMemoryError::new_err("no bytes are that long");
    let len = pyo3::ffi::Py_ssize_t::try_from(len).map_err(too_long)?;
    // SAFETY: without a string to copy, the function returns an object of that length to be filled,
    // or null with an exception set (Python/C API, "Bytes Objects"). The object is new, so no other
    // code has it before it is returned to Python.
    let bytes =
        unsafe { Bound::from_owned_ptr_or_err(py, pyo3::ffi::PyBytes_FromStringAndSize(ptr::null(), len))? };
    let bytes = bytes.cast_into::<PyBytes>()?;
    let memory = Memory::of(&bytes)?;
    Ok((bytes, memory))
}

/// Several pieces of memory as one buffer of `rdma-kv`, for one pipeline of commands.
#[derive(Clone)]
pub(crate) struct Pieces {
    /// In order, each with the offset of its first byte.
    pieces: Vec<(usize, Memory)>,
    len: usize,
}

impl Pieces {
    pub(crate) fn new(memories: impl IntoIterator<Item = Memory>) -> Self {
        let mut len = 0_usize;
        let pieces = memories.into_iter().map(|memory| {
            let start = len;
            // The sum overflows only if a caller names the same memory many times.
            len = start.saturating_add(memory.len());
            (start, memory)
        });
        let pieces = pieces.collect();
        Self { pieces, len }
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.pieces.iter().map(|(start, memory)| *start..start.saturating_add(memory.len()))
    }

    /// Returns the pieces that lie in a range, which begins and ends with one.
    pub(crate) fn within(&self, range: &Range<usize>) -> impl Iterator<Item = &Memory> {
        let first = self.pieces.partition_point(|(start, _)| *start < range.start);
        let pieces = self.pieces.get(first..).unwrap_or_default();
        pieces.iter().take_while(|(start, _)| *start < range.end).map(|(_, memory)| memory)
    }

    pub(crate) fn locate(&self, range: &Range<usize>) -> Option<(&Memory, Range<usize>)> {
        let behind = self.pieces.partition_point(|(start, _)| *start <= range.start);
        let (start, memory) = self.pieces.get(behind.checked_sub(1)?)?;
        let inside = range.start.checked_sub(*start)?..range.end.checked_sub(*start)?;
        memory.at(&inside).map(|_| (memory, inside))
    }
}

impl rdma_kv::Buffer for Pieces {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let range = offset..offset.saturating_add(into.len());
        self.locate(&range).is_some_and(|(memory, range)| memory.read(range.start, into))
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        let range = offset..offset.saturating_add(from.len());
        self.locate(&range).is_some_and(|(memory, range)| memory.write(range.start, from))
    }
}
