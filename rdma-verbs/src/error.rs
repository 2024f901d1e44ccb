//! Errors, in words that say what to do about them.

use std::borrow::Cow;
use std::io;

use rdma_backend::{ErrorKind, Failure};

/// An error of this backend. [`Failure::kind`] is its class; `Display` names the call that failed,
/// the system's reason, and the remedy if there is one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A run-time library is missing.
    #[error(
        "{library} could not be loaded ({reason}). To try without RDMA, put `softrdma run --` before the command: it needs \
         no root. For a device, install the RDMA runtime: \
         `apt install librdmacm1 libibverbs1 ibverbs-providers` on Debian and Ubuntu, \
         `dnf install librdmacm libibverbs` on Fedora and RHEL"
    )]
    Library {
        /// The file that was looked for.
        library: &'static str,
        /// The text of the dynamic linker.
        reason: String,
    },
    /// A run-time library is there but lacks a function.
    #[error(
        "the installed librdmacm and libibverbs have no function `{symbol}`: a newer rdma-core is needed"
    )]
    Symbol {
        /// Its name.
        symbol: &'static str,
    },
    /// A C function failed.
    #[error("{call}: {}{}", io::Error::from_raw_os_error(*errno), advice(*stage, *errno))]
    Call {
        /// Its name.
        call: &'static str,
        /// The error number it reported.
        errno: i32,
        /// The purpose of the call.
        stage: Stage,
    },
    /// A completion queue could not be polled.
    #[error(
        "ibv_poll_cq: the device's provider cannot read the completion queue, code {code}. Connections on this queue have \
         to be made anew"
    )]
    Poll {
        /// What the provider returned: a negative number of its own, and no error number.
        code: i32,
    },
    /// Memory could not be registered.
    #[error(
        "ibv_reg_mr of {wanted} bytes: {}. {}",
        io::Error::from_raw_os_error(*errno),
        memlock(*errno, *limit)
    )]
    Register {
        /// The length of the region.
        wanted: usize,
        /// The error number.
        errno: i32,
        /// `RLIMIT_MEMLOCK` in bytes; `None` if there is no limit.
        limit: Option<u64>,
    },
    /// A slice is not inside its region, or the region is of another domain than the queue pair.
    #[error("a slice of {len} bytes at {offset} of a region of {region} bytes {}", slice_fault(*foreign))]
    Slice {
        /// The slice's first byte.
        offset: usize,
        /// Its length.
        len: usize,
        /// The region's length.
        region: usize,
        /// Whether the region belongs to another domain.
        foreign: bool,
    },
    /// An argument is impossible.
    #[error("{0}")]
    Argument(&'static str),
    /// The object is in the wrong state for the call.
    #[error("{0}")]
    State(&'static str),
    /// This process is a forked child, and its parent has used RDMA. Nothing was done.
    #[error("{}", rdma_process::FORKED)]
    Forked,
}

/// The purpose of a C call: an error number means different things at different stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// Opening the connection manager.
    Open,
    /// Binding or resolving an address.
    Address,
    /// Creating something on a device.
    Create,
    /// Registering memory of another device.
    Register,
    /// Changing the state of a connection.
    Connection,
    /// Posting work requests.
    Post,
    /// Polling, arming and taking events.
    Complete,
}

impl Error {
    pub(crate) fn last(call: &'static str, stage: Stage) -> Self {
        Self::Call { call, errno: errno(), stage }
    }

    /// Returns the failure of `call` with the number it returned, which some providers negate.
    pub(crate) const fn returned(call: &'static str, result: i32, stage: Stage) -> Self {
        Self::Call { call, errno: result.saturating_abs(), stage }
    }

    /// Returns an error in a forked child, whose calls would act for its parent. Call this before
    /// taking a lock, which another thread of the parent may have held.
    #[inline(always)]
    pub(crate) fn unless_forked() -> Result<(), Self> {
        if rdma_process::is_child() { Err(Self::Forked) } else { Ok(()) }
    }

    pub(crate) fn register(wanted: usize, errno: i32) -> Self {
        Self::Register { wanted, errno, limit: memlock_limit() }
    }
}

impl Failure for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Library { .. } | Self::Symbol { .. } => ErrorKind::NoDevice,
            Self::Call { errno, stage, .. } => classify(*stage, *errno),
            Self::Register { errno, .. } => match *errno {
                libc::ENOMEM | libc::EAGAIN | libc::ENOSPC | libc::EPERM => ErrorKind::Memory,
                libc::EINVAL => ErrorKind::Argument,
                _ => ErrorKind::Other,
            },
            Self::Poll { .. } => ErrorKind::Other,
            Self::Slice { .. } | Self::Argument(_) => ErrorKind::Argument,
            Self::State(_) => ErrorKind::State,
            Self::Forked => ErrorKind::Forked,
        }
    }
}

pub(crate) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Clears `errno`, so that a later [`errno`] is not stale.
pub(crate) fn clear_errno() {
    // SAFETY: errno(3): the function returns the address of the calling thread's `errno`.
    unsafe { *libc::__errno_location() = 0 };
}

fn classify(stage: Stage, errno: i32) -> ErrorKind {
    match (stage, errno) {
        (Stage::Post, libc::ENOMEM | libc::EAGAIN) => ErrorKind::QueueFull,
        // erdma returns this for a queue pair in the error state; the device works.
        (Stage::Post, libc::EIO) => ErrorKind::State,
        (Stage::Open, libc::ENODEV | libc::ENOENT | libc::ENXIO | libc::ENOSYS) => ErrorKind::NoDevice,
        (Stage::Address, libc::ENODEV | libc::ENXIO | libc::ETIMEDOUT) => ErrorKind::Address,
        (
            _,
            libc::EADDRINUSE
            | libc::EADDRNOTAVAIL
            | libc::EAFNOSUPPORT
            | libc::ENETUNREACH
            | libc::ENETDOWN
            | libc::EHOSTUNREACH,
        ) => ErrorKind::Address,
        (_, libc::ENODEV | libc::EIO) => ErrorKind::NoDevice,
        (_, libc::ENOMEM | libc::ENOSPC) => ErrorKind::Memory,
        (_, libc::EMFILE | libc::ENFILE) => ErrorKind::Descriptors,
        (Stage::Create | Stage::Register, libc::EINVAL | libc::E2BIG | libc::EOPNOTSUPP) => {
            ErrorKind::Argument
        }
        (Stage::Address | Stage::Connection | Stage::Post, libc::EINVAL) => ErrorKind::State,
        (_, libc::ENOTCONN | libc::EISCONN | libc::EALREADY) => ErrorKind::State,
        _ => ErrorKind::Other,
    }
}

const fn advice(stage: Stage, errno: i32) -> &'static str {
    match (stage, errno) {
        (Stage::Open, libc::ENODEV) => {
            ". There is no RDMA device. To try without one, put `softrdma run --` before the command: it needs no root. As \
             root, `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev <interface>` makes one in software. `rdma link` \
             lists devices"
        }
        (Stage::Open, libc::ENOENT | libc::ENXIO) => {
            ". There is no /dev/infiniband/rdma_cm. To try without a device, put `softrdma run --` before the command: it \
             needs no root. With a device: `modprobe rdma_ucm`, and in a container pass in /dev/infiniband"
        }
        (Stage::Open | Stage::Address | Stage::Create, libc::EACCES | libc::EPERM) => {
            ". Opening the devices in /dev/infiniband is not permitted: see `ls -l /dev/infiniband` (often the group \
             is `rdma`), and pass them into the container if there is one"
        }
        (Stage::Address, libc::ENODEV | libc::EADDRNOTAVAIL) => {
            ". No RDMA device has this address: `rdma link` shows the devices and their interfaces, `ip address` the \
             addresses"
        }
        (Stage::Address, libc::EADDRINUSE) => ". Another identifier is bound to this address and port",
        (Stage::Connection, libc::EINVAL) => {
            ". The connection is not in a state for this; the peer may have gone"
        }
        // mthca returns -1, which is no error number.
        (Stage::Post, libc::EPERM) => ". Some providers say so when the queue is full",
        (Stage::Register, libc::EOPNOTSUPP) => {
            ". The device or its driver cannot register a dma-buf: register memory of the program and copy"
        }
        (Stage::Register, libc::EINVAL | libc::EBADF) => {
            ". The descriptor is that of no dma-buf, or the part is not inside of it"
        }
        (Stage::Create | Stage::Register | Stage::Connection, libc::ENOMEM) => {
            ". The device, or the limit on locked memory (`ulimit -l`), has no room: `rdma resource show` counts what \
             is in use"
        }
        (Stage::Open, libc::ENOSPC) => {
            ". The user's limit on what epoll instances watch (`fs.epoll.max_user_watches`) is reached"
        }
        (_, libc::EMFILE) => ". The limit on open files (`ulimit -n`) is reached",
        (_, libc::ENFILE) => ". The system's limit on open files (`fs.file-max`) is reached",
        _ => "",
    }
}

fn memlock(errno: i32, limit: Option<u64>) -> Cow<'static, str> {
    match (errno, limit) {
        (libc::ENOMEM | libc::EAGAIN | libc::EPERM, Some(limit)) => format!(
            "The limit on locked memory (RLIMIT_MEMLOCK) is {limit} bytes for everything this process registers: raise it \
             with `ulimit -l unlimited`, `LimitMEMLOCK=infinity` in the systemd unit, or `memlock` lines in \
             /etc/security/limits.conf"
        )
        .into(),
        (libc::ENOMEM, None) => {
            "The limit on locked memory is off (RLIMIT_MEMLOCK is unlimited), so memory or the device's own resources \
             are exhausted: `rdma resource show` counts what is in use"
                .into()
        }
        _ => "The length or the access rights do not suit the device".into(),
    }
}

const fn slice_fault(foreign: bool) -> &'static str {
    if foreign { "belongs to another protection domain than the queue pair" } else { "is not inside it" }
}

/// Returns `None` if there is no limit.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit(2): a live structure.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(stage: Stage, errno: i32) -> Error {
        Error::Call { call: "some_call", errno, stage }
    }

    #[test]
    fn kinds_depend_on_what_the_call_was_for() {
        let table = [
            (Stage::Open, libc::ENODEV, ErrorKind::NoDevice),
            (Stage::Open, libc::ENOENT, ErrorKind::NoDevice),
            (Stage::Open, libc::EACCES, ErrorKind::Other),
            (Stage::Address, libc::ENODEV, ErrorKind::Address),
            (Stage::Address, libc::EADDRINUSE, ErrorKind::Address),
            (Stage::Address, libc::ENETUNREACH, ErrorKind::Address),
            (Stage::Create, libc::ENOMEM, ErrorKind::Memory),
            (Stage::Create, libc::EINVAL, ErrorKind::Argument),
            (Stage::Create, libc::EMFILE, ErrorKind::Descriptors),
            (Stage::Open, libc::EMFILE, ErrorKind::Descriptors),
            (Stage::Open, libc::ENFILE, ErrorKind::Descriptors),
            (Stage::Connection, libc::EINVAL, ErrorKind::State),
            (Stage::Register, libc::EOPNOTSUPP, ErrorKind::Argument),
            (Stage::Register, libc::ENOMEM, ErrorKind::Memory),
            (Stage::Connection, libc::ENODEV, ErrorKind::NoDevice),
            (Stage::Post, libc::ENOMEM, ErrorKind::QueueFull),
            (Stage::Post, libc::EAGAIN, ErrorKind::QueueFull),
            (Stage::Post, libc::EINVAL, ErrorKind::State),
            (Stage::Post, libc::EIO, ErrorKind::State),
            (Stage::Post, libc::ENODEV, ErrorKind::NoDevice),
            (Stage::Connection, libc::EIO, ErrorKind::NoDevice),
            (Stage::Complete, libc::EINVAL, ErrorKind::Other),
        ];
        for (stage, errno, kind) in table {
            assert_eq!(call(stage, errno).kind(), kind, "{stage:?} {errno}");
        }
    }

    #[test]
    fn texts_name_the_call_the_reason_and_the_remedy() {
        let cases = [
            (
                call(Stage::Open, libc::ENODEV),
                vec!["some_call", "No such device", "softrdma run --", "rdma_rxe", "rdma link"],
            ),
            (call(Stage::Open, libc::ENOENT), vec!["softrdma run --", "rdma_ucm"]),
            (call(Stage::Open, libc::EACCES), vec!["Permission denied", "/dev/infiniband"]),
            (call(Stage::Open, libc::ENOSPC), vec!["some_call", "fs.epoll.max_user_watches"]),
            (call(Stage::Address, libc::ENODEV), vec!["No RDMA device has this address"]),
            (
                call(Stage::Register, libc::EOPNOTSUPP),
                vec!["some_call", "not supported", "cannot register a dma-buf"],
            ),
            (call(Stage::Register, libc::EBADF), vec!["no dma-buf"]),
            (call(Stage::Post, libc::EIO), vec!["some_call", "Input/output error"]),
            (call(Stage::Post, libc::EPERM), vec!["some_call", "queue is full"]),
            (
                Error::Poll { code: -2 },
                vec!["ibv_poll_cq", "cannot read the completion queue", "code -2", "anew"],
            ),
            (
                Error::Register { wanted: 12345, errno: libc::ENOMEM, limit: Some(65536) },
                vec!["12345", "65536", "RLIMIT_MEMLOCK", "ulimit -l", "LimitMEMLOCK=infinity", "limits.conf"],
            ),
            (
                Error::Register { wanted: 12345, errno: libc::ENOMEM, limit: None },
                vec!["12345", "unlimited", "rdma resource show"],
            ),
            (
                Error::Slice { offset: 10, len: 20, region: 16, foreign: false },
                vec!["20 bytes at 10", "16 bytes", "not inside"],
            ),
            (
                Error::Slice { offset: 0, len: 4, region: 16, foreign: true },
                vec!["another protection domain"],
            ),
        ];
        for (error, parts) in cases {
            let text = error.to_string();
            for part in parts {
                assert!(text.contains(part), "{part:?} is not in {text:?}");
            }
        }
    }

    #[test]
    fn only_what_opens_a_device_leads_to_its_permissions() {
        for errno in [libc::EPERM, libc::EACCES] {
            for stage in [Stage::Open, Stage::Address, Stage::Create] {
                let text = call(stage, errno).to_string();
                assert!(text.contains("/dev/infiniband"), "{text}");
            }
            for stage in [Stage::Register, Stage::Connection, Stage::Post, Stage::Complete] {
                let text = call(stage, errno).to_string();
                assert!(!text.contains("/dev/infiniband"), "{text}");
            }
        }
        let text = Error::Poll { code: -libc::EPERM }.to_string();
        assert!(!text.contains("permitted"), "{text}");
    }

    #[test]
    fn a_negated_error_number_is_the_same_error() {
        assert_eq!(Error::returned("c", -libc::ENOMEM, Stage::Post).kind(), ErrorKind::QueueFull);
        assert_eq!(Error::returned("c", libc::ENOMEM, Stage::Post).kind(), ErrorKind::QueueFull);
        assert_eq!(Error::returned("c", i32::MIN, Stage::Post).kind(), ErrorKind::Other);
    }

    #[test]
    fn the_error_number_can_be_forgotten() {
        clear_errno();
        assert_eq!(errno(), 0);
    }
}
