//! Arguments of a client's methods, and their results, from and to Python.

use std::time::Duration;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};
use rdma_kv::Part;

use crate::errors::Failure;
use crate::memory::{Memory, Pieces};

/// A key: `bytes`, or a `str`, which is encoded in UTF-8.
pub(crate) struct Key(pub(crate) Vec<u8>);

impl<'py> FromPyObject<'_, 'py> for Key {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            Ok(Self(bytes.as_bytes().to_vec()))
        } else if let Ok(text) = object.cast::<PyString>() {
            Ok(Self(text.to_cow()?.into_owned().into_bytes()))
        } else {
            Err(PyTypeError::new_err("a key is bytes or a str"))
        }
    }
}

pub(crate) fn pairs(
    parts: &Bound<'_, PyAny>,
    of: impl Fn(&Bound<'_, PyAny>) -> PyResult<Memory>,
) -> PyResult<(Vec<Key>, Pieces)> {
    let (mut keys, mut memories) = (Vec::new(), Vec::new());
    for part in parts.try_iter()? {
        let (key, buffer): (Key, Bound<'_, PyAny>) = part?.extract()?;
        keys.push(key);
        memories.push(of(&buffer)?);
    }
    Ok((keys, Pieces::new(memories)))
}

pub(crate) fn named_parts<'a>(keys: &'a [Key], pieces: &Pieces) -> Vec<Part<'a>> {
    keys.iter().zip(pieces.ranges()).map(|(key, range)| Part { key: &key.0, range }).collect()
}

/// Converts results to Python: a length, None, or an exception that is not raised.
pub(crate) fn told(
    py: Python<'_>,
    results: impl Iterator<Item = Result<Option<usize>, rdma_kv::Error>>,
) -> PyResult<Vec<Py<PyAny>>> {
    let told = results.map(|result| match result {
        Ok(len) => Ok(len.into_pyobject(py)?.into_any().unbind()),
        Err(error) => Ok(Failure::from(error).raised(py, "").into_value(py).into_any()),
    });
    told.collect()
}

pub(crate) fn several(keys: &Bound<'_, PyTuple>) -> PyResult<Vec<Key>> {
    if keys.is_empty() {
        return Err(PyTypeError::new_err("at least one key is needed"));
    }
    keys.iter().map(|key| key.extract()).collect()
}

pub(crate) fn lives(ttl: Option<f64>) -> PyResult<Option<Duration>> {
    ttl.map(|seconds| duration("ttl", seconds)).transpose()
}

pub(crate) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    let valid = Duration::try_from_secs_f64(seconds).ok().filter(|duration| !duration.is_zero());
    valid.ok_or_else(|| PyValueError::new_err(format!("{name} must be a number of seconds above 0")))
}
