//! Errors of a client as Python's exceptions, which `valkey_rdma/errors.py` defines.

use std::io;

use pyo3::prelude::*;

use crate::server::Refusal;

pub(crate) mod raised {
    pyo3::import_exception!(valkey_rdma.errors, Closed);
    pyo3::import_exception!(valkey_rdma.errors, CommandTimeout);
    pyo3::import_exception!(valkey_rdma.errors, ConnectError);
    pyo3::import_exception!(valkey_rdma.errors, ConnectionLost);
    pyo3::import_exception!(valkey_rdma.errors, Refused);
    pyo3::import_exception!(valkey_rdma.errors, RegistrationError);
    pyo3::import_exception!(valkey_rdma.errors, ValueTooLong);
}

pub(crate) enum Failure {
    Connect(Refusal),
    Register(io::Error),
    Command(rdma_kv::Error),
    /// An earlier command lost the connection, for this reason.
    Lost(String),
    Closed,
    /// The client was made before a fork, in a parent of this process.
    Forked,
}

impl From<rdma_kv::Error> for Failure {
    fn from(error: rdma_kv::Error) -> Self {
        Self::Command(error)
    }
}

impl Failure {
    pub(crate) fn loses(&self) -> Option<String> {
        match self {
            Self::Command(
                rdma_kv::Error::Refused(_)
                | rdma_kv::Error::Unserved { .. }
                | rdma_kv::Error::TooLong { .. }
                | rdma_kv::Error::Outside { .. },
            ) => None,
            Self::Command(error) => Some(error.to_string()),
            _ => None,
        }
    }

    pub(crate) fn raised(self, py: Python<'_>, url: &str) -> PyErr {
        match self {
            Self::Connect(error) => raised::ConnectError::new_err(error.to_string()),
            Self::Register(error) => raised::RegistrationError::new_err(error.to_string()),
            Self::Command(rdma_kv::Error::Refused(text)) => raised::Refused::new_err(text),
            Self::Command(error @ rdma_kv::Error::Unserved { .. }) => {
                raised::Refused::new_err(error.to_string())
            }
            Self::Command(rdma_kv::Error::TooLong { len, room }) => {
                raised::ValueTooLong::new_err((len, room))
            }
            Self::Command(rdma_kv::Error::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
                let late = raised::CommandTimeout::new_err(format!(
                    "{url}: the command took longer than `timeout` seconds"
                ));
                late.set_cause(py, Some(error.into()));
                late
            }
            Self::Command(error) => raised::ConnectionLost::new_err(format!("{url}: {error}")),
            Self::Lost(reason) => {
                let text =
                    format!("{url}: the connection was lost before: {reason}; another() makes another");
                raised::ConnectionLost::new_err(text)
            }
            Self::Closed => raised::Closed::new_err("the client was closed"),
            Self::Forked => raised::Closed::new_err(
                "this process is a forked child, and the client belongs to its parent: make another one here",
            ),
        }
    }
}
