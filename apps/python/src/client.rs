use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::address::Address;
use crate::arguments::{Key, duration, lives, named_parts, pairs, several, told};
use crate::counts::Counts;
use crate::errors::{Failure, raised};
use crate::link::{Link, Target};
use crate::memory::{Memory, Pieces, new_bytes};
use crate::server::{Settings, Way};
use crate::wire::lock;

/// The longest value that `get` returns: the default of Valkey's `proto-max-bulk-len`.
const LONGEST: usize = 512 << 20;

/// A client for large values: one connection, or in a cluster one to each primary.
///
/// A client runs one command at a time. Several threads may call its methods; each call waits
/// for the one before. While a method waits, other threads run.
///
/// Args:
///     url: The address of the server.
///         `rdma://HOST[:PORT]` connects through an RDMA device, `tcp://HOST[:PORT]` over TCP, and
///         `valkey://HOST[:PORT]` over RDMA if that connects, and over TCP otherwise.
///         `embedded://NAME` is a small store inside this process, for trying out.
///         The default port is 6379.
///         `rdma+cluster://HOST[:PORT],HOST[:PORT]` names some nodes of a cluster;
///         `tcp+cluster` and `valkey+cluster` exist, too. Each node listens for RDMA on the number
///         of its TCP port.
///         `rdma://:PASSWORD@HOST` logs in with a password, `rdma://USER:PASSWORD@HOST` as a user
///         of the server's access control list; `%40` is an `@` in both, as in other URLs.
///         `rdma://HOST/DATABASE` selects a database; the default is 0.
///         `rdma://HOST?ack_timeout=16&huge_pages=yes` has options that networks and cards may
///         want; an error lists them all.
///         Neither RDMA nor TCP encrypts a password. No message shows one.
///     timeout: Seconds that a command may take, however slowly the server answers. The default is
///         60; None has no limit. A command that takes longer loses the connection.
///     connect_timeout: Seconds that connecting to each address of a host may take.
///     window: Bytes of a receive window over RDMA. Values of several windows land in a registered
///         buffer.
///     repeats: Whether a cluster's `set` and `delete` may be sent again after their connection is
///         lost. By default only reads are. The first one may have been carried out, or may be
///         carried out later: a second `set` can replace a newer value, and a second `delete`
///         counts too few keys.
///
/// Raises:
///     ConnectError: The address is invalid, there is no RDMA device, the server cannot be reached,
///         or it refuses the password or the database. The message says which.
#[pyclass(frozen, module = "valkey_rdma", weakref)]
pub(crate) struct Client {
    address: Arc<Address>,
    settings: Settings,
    /// None after `close`.
    target: Mutex<Option<Target>>,
    line: Mutex<State>,
    /// As of the last command, so that they can be read while another one runs.
    counts: Mutex<(rdma_kv::Counts, Option<rdma_kv::Routing>)>,
    /// [`rdma_process::forks`] when it was made.
    forks: u32,
}

enum State {
    Open(Box<Link>),
    Lost(String),
    Closed,
}

impl Client {
    fn connect(address: Arc<Address>, settings: Settings, target: Target) -> Result<Self, Failure> {
        let link = target.connect(&address, settings)?;
        let counts = Mutex::new((link.counts(), link.routing()));
        let line = Mutex::new(State::Open(Box::new(link)));
        let forks = rdma_process::forks();
        Ok(Self { address, settings, target: Mutex::new(Some(target)), line, counts, forks })
    }

    /// Fails in a forked child. Its copy of a client may be in any state, with locks that a thread
    /// of the parent held.
    fn own(&self) -> Result<(), Failure> {
        if self.forks == rdma_process::forks() { Ok(()) } else { Err(Failure::Forked) }
    }

    /// Returns what `ask` does, which waits for no command.
    fn ask<R: Send>(&self, py: Python<'_>, ask: impl FnOnce() -> R + Send) -> PyResult<R> {
        self.own().map_err(|failure| failure.raised(py, self.url()))?;
        Ok(py.detach(ask))
    }

    /// Runs a command while other Python threads run. An error that loses the connection ends it
    /// first, so that it uses no buffer any more when the error is raised.
    fn command<R: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Link) -> Result<R, rdma_kv::Error> + Send,
    ) -> PyResult<R> {
        let done = py.detach(|| {
            self.own()?;
            let mut line = lock(&self.line);
            let link = match &mut *line {
                State::Open(link) => link,
                State::Lost(reason) => return Err(Failure::Lost(reason.clone())),
                State::Closed => return Err(Failure::Closed),
            };
            let done = act(link);
            *lock(&self.counts) = (link.counts(), link.routing());
            let heals = link.heals();
            done.map_err(|error| {
                let failure = Failure::from(error);
                if let Some(reason) = failure.loses().filter(|_| !heals) {
                    *line = State::Lost(reason);
                }
                failure
            })
        });
        done.map_err(|failure| failure.raised(py, self.url()))
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(
        signature = (url, *, timeout = Some(60.0), connect_timeout = 5.0, window = 1_048_576, repeats = false),
        text_signature = "(url, *, timeout=60.0, connect_timeout=5.0, window=1048576, repeats=False)"
    )]
    fn new(
        py: Python<'_>,
        url: &str,
        timeout: Option<f64>,
        connect_timeout: f64,
        window: u32,
        repeats: bool,
    ) -> PyResult<Self> {
        let settings = Settings {
            timeout: timeout.map(|seconds| duration("timeout", seconds)).transpose()?,
            connect_timeout: duration("connect_timeout", connect_timeout)?,
            window,
            repeats,
        };
        let connected = py.detach(|| {
            let address = Arc::new(Address::parse(url).map_err(Failure::Connect)?);
            let target = Target::named(&address, settings).map_err(Failure::Connect)?;
            Self::connect(address, settings, target)
        });
        // Without the address, which may contain a password.
        connected.map_err(|failure| failure.raised(py, ""))
    }

    /// Connect again to the same server, with the same settings.
    ///
    /// Both clients share their registered buffers, also those that are registered later: their
    /// connections are in one protection domain. This works after this client has lost its
    /// connection, and fails after `close()`.
    ///
    /// Raises:
    ///     ConnectError: The server cannot be reached, or refuses the password or the database.
    ///     Closed: This client is closed.
    fn another(&self, py: Python<'_>) -> PyResult<Self> {
        let connected = py.detach(|| {
            self.own()?;
            let target = lock(&self.target).clone().ok_or(Failure::Closed)?;
            Self::connect(Arc::clone(&self.address), self.settings, target)
        });
        connected.map_err(|failure| failure.raised(py, self.url()))
    }

    /// Register a writable buffer. Values land in it and are sent from it without a copy.
    ///
    /// Registering pins the memory, which takes about as long as copying it. Register memory once
    /// if it is used often. Parts of the buffer (a slice of a memoryview, a view of an array) are
    /// found by their address and need no registration of their own. No other call registers
    /// memory. Over TCP the kernel copies all bytes, registered or not.
    ///
    /// A buffer stays registered until `unregister()`, or until this client and all clients of
    /// `another()` are closed. Until then the object is kept alive and cannot be resized
    /// (`BufferError`), and the server can write to the memory at any time. A server that obeys
    /// the protocol writes only requested values. Register a buffer with one server only, and
    /// change it only while no command uses it.
    ///
    /// Args:
    ///     buffer: The buffer.
    ///     slice_length: Bytes of a registration. None registers the whole buffer at once. Some
    ///         cards are slow with one registration of many GiB. For each slice that a value
    ///         touches, up to two of its windows are copied.
    ///
    /// Raises:
    ///     BufferError: The buffer is read-only, not contiguous or empty, or a part of it is
    ///         registered already.
    ///     RegistrationError: The memory cannot be registered. The message names the limit.
    ///     ConnectionLost: The connection is lost.
    ///     Closed: The client is closed.
    ///     ValueError: `slice_length` is zero.
    #[pyo3(signature = (buffer, *, slice_length = None))]
    fn register(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        slice_length: Option<usize>,
    ) -> PyResult<()> {
        let memory = Memory::writable(buffer)?;
        if memory.len() == 0 {
            return Err(PyBufferError::new_err("the buffer has no bytes"));
        }
        if slice_length == Some(0) {
            return Err(PyValueError::new_err("a slice has at least one byte"));
        }
        let memory = match slice_length {
            Some(length) => memory.to_register().in_slices(length),
            None => memory.to_register(),
        };
        let registered = py.detach(|| {
            self.own()?;
            match &mut *lock(&self.line) {
                State::Open(link) => link.register(memory),
                State::Lost(reason) => Err(Failure::Lost(reason.clone())),
                State::Closed => Err(Failure::Closed),
            }
        });
        match registered {
            Ok(true) => Ok(()),
            Ok(false) => Err(PyBufferError::new_err("some of the buffer is registered already")),
            Err(failure) => Err(failure.raised(py, self.url())),
        }
    }

    /// Undo `register()`.
    ///
    /// The buffer is the caller's alone when this returns. If a command of another thread uses the
    /// buffer, it is when that command ends.
    ///
    /// Raises:
    ///     BufferError: No registered buffer begins where this one does.
    fn unregister(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let address = Memory::of(buffer)?.start().addr();
        let unregistered = self.ask(py, || {
            let target = lock(&self.target).clone();
            target.is_some_and(|target| target.unregister(address))
        })?;
        if unregistered { Ok(()) } else { Err(PyBufferError::new_err("the buffer is not registered")) }
    }

    /// Get a value into a writable, contiguous buffer, from its first byte on.
    ///
    /// A shorter value leaves the rest of the buffer unchanged. When this returns or raises, the
    /// command does not use the buffer any more. After an exception the contents are undefined.
    ///
    /// Returns:
    ///     The length of the value in bytes; None if there is no such key.
    ///
    /// Raises:
    ///     ValueTooLong: The value is longer than the buffer. It was read and dropped; the client
    ///         can be used further.
    ///     Refused: The server refused the command; the client can be used further.
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    fn get_into(&self, py: Python<'_>, key: Key, buffer: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let mut pieces = Pieces::new([Memory::writable(buffer)?]);
        self.command(py, |link| link.get_into(&key.0, &mut pieces))
    }

    /// Get a value as new bytes, which are not registered memory.
    ///
    /// This requests the length first.
    ///
    /// Returns:
    ///     The value; None if there is no such key.
    ///
    /// Raises:
    ///     Refused: The server refused the command; the client can be used further.
    ///     ValueTooLong: The value has more than 512 MiB, or grew during each of three attempts.
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    fn get<'py>(&self, py: Python<'py>, key: Key) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut room = usize::try_from(self.command(py, |link| link.strlen(&key.0))?)?.min(LONGEST);
        let mut more = 2;
        loop {
            let (bytes, memory) = new_bytes(py, room)?;
            let mut pieces = Pieces::new([memory]);
            match self.command(py, |link| link.get_into(&key.0, &mut pieces)) {
                Ok(len) if len == Some(room) => return Ok(Some(bytes)),
                Ok(len) => {
                    let value = len.and_then(|len| bytes.as_bytes().get(..len));
                    return Ok(value.map(|value| PyBytes::new(py, value)));
                }
                // The value has grown since its length was requested.
                Err(error) if more > 0 && error.is_instance_of::<raised::ValueTooLong>(py) => {
                    more -= 1;
                    room = error.value(py).getattr("length")?.extract::<usize>()?.min(LONGEST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Get many values, each into a buffer of its own.
    ///
    /// Commands are sent ahead of the replies, as far as the server accepts them.
    ///
    /// Args:
    ///     parts: Pairs of a key and a writable, contiguous buffer.
    ///
    /// Returns:
    ///     For each pair the length of the value in bytes, None if there is no such key, or an
    ///     error of this pair: `ValueTooLong` or `Refused`.
    ///
    /// Raises:
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    fn mget_into(&self, py: Python<'_>, parts: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyAny>>> {
        let (keys, mut pieces) = pairs(parts, Memory::writable)?;
        let parts = named_parts(&keys, &pieces);
        told(py, self.command(py, |link| link.mget_into(&parts, &mut pieces))?.into_iter())
    }

    /// Set a key to the bytes of a contiguous buffer.
    ///
    /// When this returns or raises, the command does not use the buffer any more.
    ///
    /// Args:
    ///     key: The key.
    ///     buffer: Its value.
    ///     ttl: The key's lifetime in seconds, in steps of a millisecond. None has no limit.
    ///
    /// Raises:
    ///     Refused: The server refused the command (its memory is full, for example); the client can be used further.
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    #[pyo3(signature = (key, buffer, *, ttl = None))]
    fn set_from(
        &self,
        py: Python<'_>,
        key: Key,
        buffer: &Bound<'_, PyAny>,
        ttl: Option<f64>,
    ) -> PyResult<()> {
        let pieces = Pieces::new([Memory::of(buffer)?]);
        let lives = lives(ttl)?;
        self.command(py, |link| link.set_from(&key.0, &pieces, lives))
    }

    /// Set a key to a `str`, which is encoded in UTF-8, or to bytes.
    ///
    /// Args:
    ///     key: The key.
    ///     value: Its value.
    ///     ttl: The key's lifetime in seconds, in steps of a millisecond. None has no limit.
    ///
    /// Raises:
    ///     Refused: The server refused the command (its memory is full, for example); the client can be used further.
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    #[pyo3(signature = (key, value, *, ttl = None))]
    fn set(&self, py: Python<'_>, key: Key, value: &Bound<'_, PyAny>, ttl: Option<f64>) -> PyResult<()> {
        match value.cast::<PyString>() {
            Ok(text) => self.set_from(py, key, &PyBytes::new(py, text.to_cow()?.as_bytes()), ttl),
            Err(_) => self.set_from(py, key, value, ttl),
        }
    }

    /// Set many keys, each to the bytes of a buffer of its own.
    ///
    /// Commands are sent ahead of the replies, as far as the server accepts them.
    ///
    /// Args:
    ///     parts: Pairs of a key and a contiguous buffer.
    ///     ttl: The keys' lifetime in seconds, in steps of a millisecond. None has no limit.
    ///
    /// Returns:
    ///     For each pair None, or `Refused` if the server refused this one.
    ///
    /// Raises:
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    #[pyo3(signature = (parts, *, ttl = None))]
    fn mset_from(
        &self,
        py: Python<'_>,
        parts: &Bound<'_, PyAny>,
        ttl: Option<f64>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let (keys, pieces) = pairs(parts, Memory::of)?;
        let lives = lives(ttl)?;
        let results =
            self.command(py, |link| link.mset_from(&named_parts(&keys, &pieces), &pieces, lives))?;
        told(py, results.into_iter().map(|result| result.map(|()| None)))
    }

    /// Return how many of these keys exist. A key that is named twice counts twice.
    #[pyo3(signature = (*keys))]
    fn exists(&self, py: Python<'_>, keys: &Bound<'_, PyTuple>) -> PyResult<u64> {
        let keys = several(keys)?;
        let keys: Vec<&[u8]> = keys.iter().map(|key| &*key.0).collect();
        self.command(py, |link| link.exists(&keys))
    }

    /// Return for each key whether it exists. Commands are sent ahead of the replies.
    #[pyo3(signature = (*keys))]
    fn present(&self, py: Python<'_>, keys: &Bound<'_, PyTuple>) -> PyResult<Vec<bool>> {
        let keys = several(keys)?;
        let keys: Vec<&[u8]> = keys.iter().map(|key| &*key.0).collect();
        self.command(py, |link| link.present(&keys))
    }

    /// Delete keys. Returns how many existed.
    #[pyo3(signature = (*keys))]
    fn delete(&self, py: Python<'_>, keys: &Bound<'_, PyTuple>) -> PyResult<u64> {
        let keys = several(keys)?;
        let keys: Vec<&[u8]> = keys.iter().map(|key| &*key.0).collect();
        self.command(py, |link| link.del(&keys))
    }

    /// Return the length of a value in bytes, 0 if there is no such key.
    fn strlen(&self, py: Python<'_>, key: Key) -> PyResult<u64> {
        self.command(py, |link| link.strlen(&key.0))
    }

    /// Return how much memory each node uses (`INFO memory`).
    ///
    /// Returns:
    ///     For each node, by its address, a dict of `used_memory` and `maxmemory` in bytes. A
    ///     `maxmemory` of 0 is no limit.
    ///
    /// Raises:
    ///     Refused: A server refused the command; the client can be used further.
    ///     ConnectionLost: A connection ended, or `timeout` passed (CommandTimeout).
    fn node_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let alone = self.address.hosts.first().map_or("", String::as_str);
        let told = PyDict::new(py);
        for (node, memory) in self.command(py, |link| link.memory(alone))? {
            let of = PyDict::new(py);
            of.set_item("used_memory", memory.used)?;
            of.set_item("maxmemory", memory.most)?;
            told.set_item(node, of)?;
        }
        Ok(told)
    }

    /// Counts of bytes landed, lent and copied, as of the last command that has ended.
    #[getter]
    fn counts(&self, py: Python<'_>) -> PyResult<Counts> {
        self.ask(py, || Counts::from(lock(&self.counts).0))
    }

    /// Counts of a cluster's redirections, as of the last command that has ended.
    ///
    /// `moved` and `asked` are keys that a node redirected with MOVED and ASK. `repeated` are keys
    /// that were tried again because their node was lost or could not serve them. `refreshed` is
    /// how often the map of slots was requested, `connected` how often a node was connected to.
    /// None if the server is not a cluster.
    #[getter]
    fn routing<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(routing) = self.ask(py, || lock(&self.counts).1)? else { return Ok(None) };
        let told = PyDict::new(py);
        for (name, count) in [
            ("moved", routing.moved),
            ("asked", routing.asked),
            ("repeated", routing.repeated),
            ("refreshed", routing.refreshed),
            ("connected", routing.connected),
        ] {
            told.set_item(name, count)?;
        }
        Ok(Some(told))
    }

    /// Whether the connection is lost: each further command raises `ConnectionLost`, and sends
    /// nothing. `another()` connects again. A client of a cluster connects again by itself.
    #[getter]
    fn lost(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(*lock(&self.line), State::Lost(_)))
    }

    /// The transport: `rdma`, `tcp` or `embedded`. None after `close()`.
    #[getter]
    fn transport(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        let way = self.ask(py, || lock(&self.target).as_ref().and_then(Target::way))?;
        Ok(way.map(|way| match way {
            Way::Rdma => "rdma",
            Way::Tcp(_) => "tcp",
            Way::Embedded => "embedded",
        }))
    }

    /// Why a client of `valkey://` does not use RDMA. None if it does, and for other addresses.
    #[getter]
    fn no_rdma(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let way = self.ask(py, || lock(&self.target).as_ref().and_then(Target::way))?;
        Ok(way.and_then(|way| if let Way::Tcp(reason) = way { reason } else { None }))
    }

    /// How many buffers are registered, with this client and all clients of `another()`.
    #[getter]
    fn registrations(&self, py: Python<'_>) -> PyResult<usize> {
        self.ask(py, || lock(&self.target).as_ref().map_or(0, Target::registrations))
    }

    /// Close the connection, after the running command.
    ///
    /// Buffers stay registered while a client is open that shares them by `another()`. In a forked
    /// child this has no effect.
    fn close(&self, py: Python<'_>) {
        if self.own().is_err() {
            return;
        }
        py.detach(|| {
            // In this order: a connection ends before its memory is deregistered. Releasing a
            // buffer attaches to the interpreter. So no lock is held that an attached thread may
            // wait for.
            let line = std::mem::replace(&mut *lock(&self.line), State::Closed);
            drop(line);
            let target = lock(&self.target).take();
            drop(target);
        });
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) {
        let _whatever_it_is = (kind, error, traceback);
        self.close(py);
    }

    /// Return the address of the server, without the user and the password.
    #[getter]
    fn url(&self) -> &str {
        &self.address.shown
    }

    fn __repr__(&self) -> String {
        format!("<valkey_rdma.Client of {}>", self.address.shown)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.own().is_err() {
            // A thread of the parent may have been changing them.
            let line = std::mem::replace(&mut self.line, Mutex::new(State::Closed));
            std::mem::forget((line, self.target.get_mut().ok().map(Option::take)));
            return;
        }
        Python::attach(|py| self.close(py));
    }
}
