#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::io;
use std::net::IpAddr;
use std::sync::LazyLock;

use rdma_backend::Backend as _;
use rdma_conn::Error;
use rdma_softsim::Fabric;

pub use rdma_softsim::SoftSim;
pub use rdma_verbs::Verbs;

/// The backends, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum BackendName {
    /// This machine's RDMA devices, through librdmacm and libibverbs.
    #[default]
    Verbs,
    /// An RDMA fabric inside this process, which no other process reaches.
    Softsim,
}

/// One of the backends.
#[derive(Clone, Debug)]
pub enum AnyBackend {
    /// See [`BackendName::Verbs`].
    Verbs(Verbs),
    /// See [`BackendName::Softsim`].
    SoftSim(SoftSim),
}

impl AnyBackend {
    /// Opens a backend. A simulated host gets `address`; devices have their own.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::Unsupported`] if there is no RDMA device or a library is missing.
    pub fn open(name: BackendName, address: IpAddr) -> io::Result<Self> {
        Ok(match name {
            BackendName::Verbs => Self::Verbs(verbs()?),
            BackendName::Softsim => Self::SoftSim(softsim(address)),
        })
    }

    /// Opens this machine's RDMA devices, for programs that offer no choice.
    ///
    /// # Errors
    /// As [`AnyBackend::open`].
    pub fn devices() -> io::Result<Self> {
        Ok(Self::Verbs(verbs()?))
    }
}

/// Opens librdmacm and libibverbs, and checks that there is a device.
///
/// # Errors
/// Returns [`Error::Backend`], with the kind `NoDevice` if there is none or a library is missing.
pub fn verbs() -> Result<Verbs, Error> {
    let verbs = Verbs::load().map_err(Error::backend("opening RDMA"))?;
    // The libraries may exist without a device.
    drop(verbs.event_channel().map_err(Error::backend("opening RDMA"))?);
    Ok(verbs)
}

/// Returns a host with this address on the simulated network of this process. If another host has
/// the address, it moves to this one.
pub fn softsim(address: impl Into<IpAddr>) -> SoftSim {
    static NETWORK: LazyLock<Fabric> = LazyLock::new(Fabric::new);
    NETWORK.host(&[address.into()])
}

/// Defines an enum with a value for whichever backend: `one_of!(enum Kind(Side))` has the variants
/// `Kind::Verbs(Side<Verbs>)` and so on.
#[macro_export]
macro_rules! one_of {
    ($(#[$meta:meta])* $vis:vis enum $name:ident($of:ident)) => {
        $(#[$meta])*
        $vis enum $name {
            Verbs($of<$crate::Verbs>),
            SoftSim($of<$crate::SoftSim>),
        }
    };
}

/// Evaluates an expression, compiled for each backend, with the value of the backend there is.
///
/// - `either!(value, Kind(side) => expression)`: a `match` of the variants of `Kind`, which is
///   [`AnyBackend`] or of [`one_of!`];
/// - `either!(value, Kind(side) -> Other => expression)`: the result is in the same variant of
///   `Other`;
/// - `either!((one, two), (Kind(side), Other(it)) => expression, _ => otherwise)`: of two values
///   that may be of different backends.
#[macro_export]
macro_rules! either {
    ($value:expr, $name:ident($inner:pat) => $does:expr) => {
        match $value {
            $name::Verbs($inner) => $does,
            $name::SoftSim($inner) => $does,
        }
    };
    ($value:expr, $name:ident($inner:pat) -> $to:ident => $does:expr) => {
        match $value {
            $name::Verbs($inner) => $to::Verbs($does),
            $name::SoftSim($inner) => $to::SoftSim($does),
        }
    };
    ($values:expr, ($one:ident($first:pat), $two:ident($second:pat)) => $does:expr, _ => $otherwise:expr) => {
        match $values {
            ($one::Verbs($first), $two::Verbs($second)) => $does,
            ($one::SoftSim($first), $two::SoftSim($second)) => $does,
            _ => $otherwise,
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    type Twice<B> = (B, B);
    one_of!(enum Pair(Twice));

    #[test]
    fn an_expression_is_compiled_for_each_backend() {
        let backend = AnyBackend::open(BackendName::Softsim, [192, 0, 2, 1].into()).expect("needs no device");
        let pair = either!(backend, AnyBackend(backend) -> Pair => (backend.clone(), backend));
        assert!(matches!(pair, Pair::SoftSim(_)));
        let opened = either!(&pair, Pair((_, backend)) => backend.event_channel().is_ok());
        assert!(opened);
        let alike = either!((&pair, &pair), (Pair(_), Pair(_)) => true, _ => false);
        assert!(alike);
    }

    #[test]
    fn a_missing_device_is_an_unsupported_operation() {
        match AnyBackend::devices() {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::Unsupported);
                assert!(error.to_string().starts_with("opening RDMA: "), "{error}");
            }
        }
    }
}
