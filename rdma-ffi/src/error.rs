//! Results of calls: a code, whose fault it is, and a text.

use std::any::Any;
use std::borrow::Cow;
use std::ffi::c_char;
use std::mem::{MaybeUninit, forget};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rdma_backend::ErrorKind;
use rdma_conn::Error;
use rdma_proto::{Error as Protocol, TransportError};

/// The result of a call: `VKRDMA_OK`, `VKRDMA_AGAIN`, or what went wrong. More may be added.
#[repr(i32)]
#[allow(non_camel_case_types, missing_docs, reason = "names and texts are those of the header")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Done.
    VKRDMA_OK = 0,
    /// Not now; an event follows. This is no error, and `vkrdma_error` is unchanged.
    VKRDMA_AGAIN = 1,

    /// An argument is null, out of bounds, or a text of the wrong form.
    VKRDMA_INVALID_ARGUMENT = 100,
    /// A field of options or limits is out of bounds, or `size` is wrong.
    VKRDMA_INVALID_OPTIONS = 101,
    /// The endpoint has no such connection: it was freed, or never existed. Or it is still being
    /// established, and has no such property yet.
    VKRDMA_NO_SUCH_CONNECTION = 102,
    /// The endpoint has no such listener.
    VKRDMA_NO_SUCH_LISTENER = 103,
    /// The call is not allowed now: a write after the close, more bytes consumed than have arrived,
    /// a range beyond a buffer's end.
    VKRDMA_MISUSE = 104,
    /// The buffer was registered for a connection in another protection domain.
    VKRDMA_FOREIGN_BUFFER = 105,
    /// The route to the peer uses another device than the protection domain.
    VKRDMA_FOREIGN_DOMAIN = 106,
    /// This process is a forked child, which cannot use the parent's handles. Nothing was done.
    VKRDMA_FORKED = 107,

    /// There is no RDMA device, or its run-time library is missing.
    VKRDMA_NO_DEVICE = 200,
    /// No RDMA device of this machine has the address, or it is in use.
    VKRDMA_ADDRESS = 201,
    /// No more memory can be registered: see RLIMIT_MEMLOCK, or the device's limits.
    VKRDMA_MEMORY = 202,
    /// The process or the system has reached its limit of descriptors.
    VKRDMA_DESCRIPTORS = 203,
    /// The device, its driver or the kernel refused something else.
    VKRDMA_BACKEND = 204,
    /// The limit `vkrdma_limits.connections` is reached.
    VKRDMA_TOO_MANY_CONNECTIONS = 205,
    /// The limit `vkrdma_limits.registered_bytes` is reached.
    VKRDMA_REGISTERED_MEMORY = 206,
    /// The device reported a failure.
    VKRDMA_DEVICE_FAILED = 207,
    /// The device was removed.
    VKRDMA_DEVICE_REMOVED = 208,
    /// Waiting for descriptors failed, or creating one.
    VKRDMA_WAIT = 209,

    /// Nothing listens at the peer's address and port.
    VKRDMA_REFUSED = 300,
    /// The peer rejected the connection.
    VKRDMA_REJECTED = 301,
    /// The peer cannot be reached by RDMA.
    VKRDMA_UNREACHABLE = 302,
    /// A time-out passed.
    VKRDMA_TIMED_OUT = 303,
    /// The peer disconnected before all bytes were delivered.
    VKRDMA_DISCONNECTED = 304,
    /// The fabric, a device on the path or the peer's host failed.
    VKRDMA_TRANSPORT = 305,
    /// The peer sent an invalid control message.
    VKRDMA_INVALID_MESSAGE = 306,
    /// The peer broke a rule of the protocol.
    VKRDMA_PEER_MISBEHAVED = 307,
    /// The options of this side do not allow what the peer does.
    VKRDMA_PEER_INCOMPATIBLE = 308,

    /// The library is in a state that should be impossible. Please report it.
    VKRDMA_BUG = 400,
    /// The library panicked. Nothing has unwound into the program. All further calls on the
    /// endpoint return this code: free it.
    VKRDMA_PANIC = 401,
}

/// Whose fault an error is.
#[repr(i32)]
#[allow(non_camel_case_types, missing_docs, reason = "as above")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is no error.
    VKRDMA_FAULT_NONE = 0,
    /// The program that made the call.
    VKRDMA_FAULT_CALLER = 1,
    /// This machine: its device, its resources, or the limits that the program has set.
    VKRDMA_FAULT_HERE = 2,
    /// The peer.
    VKRDMA_FAULT_PEER = 3,
    /// The network or the peer's host. From this side they cannot be told apart.
    VKRDMA_FAULT_NETWORK = 4,
    /// This library.
    VKRDMA_FAULT_LIBRARY = 5,
}

/// Bytes of the text of an error, the closing zero included.
pub const VKRDMA_ERROR_TEXT: usize = 504;

/// Describes an error. A call that fails fills it in; any other call leaves it unchanged.
#[repr(C)]
pub struct Failed {
    /// What the call returned.
    pub code: Code,
    /// Whose fault it is.
    pub fault: Fault,
    /// What happened and, if known, what to do: a line of UTF-8, closed by a zero, cut if too long.
    pub text: [c_char; VKRDMA_ERROR_TEXT],
}

pub(crate) type Told<'a> = Option<&'a mut MaybeUninit<Failed>>;

#[derive(Debug)]
pub(crate) enum Failure {
    /// Nothing is wrong, but there is no result yet.
    Again,
    /// An error that this crate found.
    Here(Code, Cow<'static, str>),
    /// An error of a connection or an endpoint.
    Conn(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Conn(error)
    }
}

impl Failure {
    pub(crate) const fn argument(text: &'static str) -> Self {
        Self::Here(Code::VKRDMA_INVALID_ARGUMENT, Cow::Borrowed(text))
    }

    fn code(&self) -> Code {
        match self {
            Self::Again => Code::VKRDMA_AGAIN,
            Self::Here(code, _) => *code,
            Self::Conn(error) => code_of(error),
        }
    }
}

fn code_of(error: &Error) -> Code {
    match error {
        Error::NoSuchHost { .. } => Code::VKRDMA_INVALID_ARGUMENT,
        Error::Backend { kind, .. } => match kind {
            ErrorKind::NoDevice => Code::VKRDMA_NO_DEVICE,
            ErrorKind::Address => Code::VKRDMA_ADDRESS,
            ErrorKind::Memory => Code::VKRDMA_MEMORY,
            ErrorKind::Descriptors => Code::VKRDMA_DESCRIPTORS,
            _ => Code::VKRDMA_BACKEND,
        },
        Error::Refused { .. } => Code::VKRDMA_REFUSED,
        Error::Rejected { .. } => Code::VKRDMA_REJECTED,
        Error::Unreachable { .. } => Code::VKRDMA_UNREACHABLE,
        Error::TimedOut { .. } => Code::VKRDMA_TIMED_OUT,
        Error::Protocol(protocol) => match protocol {
            Protocol::InvalidMessage(_) => Code::VKRDMA_INVALID_MESSAGE,
            Protocol::PeerMisbehaved(_) => Code::VKRDMA_PEER_MISBEHAVED,
            Protocol::PeerIncompatible(_) => Code::VKRDMA_PEER_INCOMPATIBLE,
            Protocol::Transport(TransportError::Disconnected) => Code::VKRDMA_DISCONNECTED,
            Protocol::Transport(TransportError::CloseTimedOut { .. }) => Code::VKRDMA_TIMED_OUT,
            Protocol::Transport(_) => Code::VKRDMA_TRANSPORT,
            Protocol::ApiMisuse(rdma_proto::ApiMisuse::Config { .. }) => Code::VKRDMA_INVALID_OPTIONS,
            Protocol::ApiMisuse(_) => Code::VKRDMA_MISUSE,
            _ => Code::VKRDMA_BUG,
        },
        Error::Options { .. } => Code::VKRDMA_INVALID_OPTIONS,
        Error::Wait(source) => match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Code::VKRDMA_DESCRIPTORS,
            _ => Code::VKRDMA_WAIT,
        },
        Error::RegisteredMemory { .. } => Code::VKRDMA_REGISTERED_MEMORY,
        Error::TooManyConnections { .. } => Code::VKRDMA_TOO_MANY_CONNECTIONS,
        Error::Listening => Code::VKRDMA_MISUSE,
        Error::PipeWaker => Code::VKRDMA_INVALID_ARGUMENT,
        Error::NoSuchConnection => Code::VKRDMA_NO_SUCH_CONNECTION,
        Error::ForeignBuffer => Code::VKRDMA_FOREIGN_BUFFER,
        Error::ForeignDomain => Code::VKRDMA_FOREIGN_DOMAIN,
        Error::Device { .. } => Code::VKRDMA_DEVICE_FAILED,
        Error::DeviceRemoved => Code::VKRDMA_DEVICE_REMOVED,
        Error::Forked => Code::VKRDMA_FORKED,
        _ => Code::VKRDMA_BUG,
    }
}

impl Code {
    const fn fault(self) -> Fault {
        match self as i32 {
            0..100 => Fault::VKRDMA_FAULT_NONE,
            100..200 => Fault::VKRDMA_FAULT_CALLER,
            200..300 => Fault::VKRDMA_FAULT_HERE,
            300..400 => match self {
                Self::VKRDMA_UNREACHABLE
                | Self::VKRDMA_TIMED_OUT
                | Self::VKRDMA_DISCONNECTED
                | Self::VKRDMA_TRANSPORT => Fault::VKRDMA_FAULT_NETWORK,
                _ => Fault::VKRDMA_FAULT_PEER,
            },
            _ => Fault::VKRDMA_FAULT_LIBRARY,
        }
    }
}

#[inline(always)]
pub(crate) fn call(told: Told<'_>, does: impl FnOnce() -> Result<(), Failure>) -> Code {
    guarded(told, |told| coded(told, does()))
}

#[inline(always)]
pub(crate) fn guarded(mut told: Told<'_>, does: impl FnOnce(&mut Told<'_>) -> Code) -> Code {
    // Before the endpoint's lock, which another thread of the parent may have held.
    if rdma_process::is_child() {
        return tell(&mut told, Error::Forked.into());
    }
    // A panic leaves the endpoint marked, so no half-changed state is used again.
    match catch_unwind(AssertUnwindSafe(|| does(&mut told))) {
        Ok(code) => code,
        Err(panic) => tell(&mut told, panicked(panic)),
    }
}

/// Called where the result is made: hands on a number, and not a failure, which is long.
#[inline(always)]
pub(crate) fn coded(told: &mut Told<'_>, result: Result<(), Failure>) -> Code {
    match result {
        Ok(()) => Code::VKRDMA_OK,
        Err(Failure::Again) => Code::VKRDMA_AGAIN,
        Err(failure) => tell(told, failure),
    }
}

#[cold]
#[inline(never)]
pub(crate) fn tell(told: &mut Told<'_>, failure: Failure) -> Code {
    let failure = &failure;
    // Formatting an error may panic as well.
    let code = catch_unwind(AssertUnwindSafe(|| failure.code())).unwrap_or(Code::VKRDMA_PANIC);
    if let Some(told) = told {
        let text = catch_unwind(AssertUnwindSafe(|| match failure {
            Failure::Again => String::new(),
            Failure::Here(_, text) => text.clone().into_owned(),
            Failure::Conn(error) => error.to_string(),
        }));
        told.write(Failed { code, fault: code.fault(), text: line(&text.unwrap_or_default()) });
    }
    code
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> Failure {
    let said = match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => match other.downcast::<&'static str>() {
            Ok(text) => (*text).into(),
            Err(other) => {
                forget(other);
                "a value that is no text".into()
            }
        },
    };
    let text = format!("the library panicked, which is a bug of it; please report it: {said}");
    Failure::Here(Code::VKRDMA_PANIC, text.into())
}

/// Without control characters, cut if too long.
pub(crate) fn line<const LEN: usize>(text: &str) -> [c_char; LEN] {
    let mut line = [0; LEN];
    let mut end = text.len().min(LEN - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (place, byte) in line.iter_mut().zip(text.as_bytes().iter().take(end)) {
        let byte = if byte.is_ascii_control() { b' ' } else { *byte };
        *place = c_char::from_ne_bytes([byte]);
    }
    line
}
