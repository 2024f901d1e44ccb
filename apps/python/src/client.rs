//! The class `Client`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};
use rdma_kv::Part;

use crate::address::Address;
use crate::counts::Counts;
use crate::errors::{Failure, raised};
use crate::link::{Link, Target};
use crate::memory::{Memory, Pieces, new_bytes};
use crate::server::{Settings, Way};
use crate::wire::lock;

/// Bytes of a value that `get` makes an object of at most: Valkey's `proto-max-bulk-len`, unless it is set otherwise.
const LONGEST: usize = 512 << 20;

/// A client for large values on one connection, or of a cluster with one to each primary; one command at a time.
///
/// Methods can be called from several threads; each waits for the one before. While a method waits, other threads run.
///
/// Args:
///     url: `rdma://HOST[:PORT]` for a server through an RDMA device, `tcp://HOST[:PORT]` for one over TCP, `valkey://HOST[:PORT]` for RDMA
///         where that connects and TCP otherwise, or `embedded://NAME` for a small store inside this process, for trying out. The port
///         is 6379 if none is given. Of a cluster, some nodes: `rdma+cluster://HOST[:PORT],HOST[:PORT]`, and `tcp+cluster` and
///         `valkey+cluster` likewise; each node listens for RDMA on the number of its TCP port. With a password, `rdma://:PASSWORD@HOST`,
///         or `rdma://USER:PASSWORD@HOST` for a user of the server's access control list; `%40` is an `@` in them, as in other URLs.
///         With another database than 0, `rdma://HOST/DATABASE`. Neither RDMA nor TCP encrypts them; no message shows a password.
///     timeout: Seconds that a command may take, 60 unless given, however slowly the server answers; the connection is lost then. None waits for ever.
///     connect_timeout: Seconds that connecting may take, for each of the host's addresses.
///     window: Bytes of a receive window, over RDMA. Values of several windows land in a registered buffer.
///
/// Raises:
///     ConnectError: The address is none, there is no RDMA device, the server cannot be reached, or it refuses the password or the
///         database; the message says which.
#[pyclass(frozen, module = "valkey_rdma", weakref)]
pub(crate) struct Client {
    address: Arc<Address>,
    settings: Settings,
    /// None once it was closed.
    target: Mutex<Option<Target>>,
    line: Mutex<State>,
    /// As of the last command, so that they can be read while one is under way.
    counts: Mutex<(rdma_kv::Counts, Option<rdma_kv::Routing>)>,
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
        Ok(Self { address, settings, target: Mutex::new(Some(target)), line, counts })
    }

    /// Does a command while other Python threads run. What loses the connection ends it: when the error is raised, nothing uses a
    /// buffer for this connection any more.
    fn command<R: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Link) -> Result<R, rdma_kv::Error> + Send,
    ) -> PyResult<R> {
        let done = py.detach(|| {
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
        signature = (url, *, timeout = Some(60.0), connect_timeout = 5.0, window = 1_048_576),
        text_signature = "(url, *, timeout=60.0, connect_timeout=5.0, window=1048576)"
    )]
    fn new(
        py: Python<'_>,
        url: &str,
        timeout: Option<f64>,
        connect_timeout: f64,
        window: u32,
    ) -> PyResult<Self> {
        let settings = Settings {
            timeout: timeout.map(|seconds| duration("timeout", seconds)).transpose()?,
            connect_timeout: duration("connect_timeout", connect_timeout)?,
            window,
        };
        let connected = py.detach(|| {
            let address = Arc::new(Address::parse(url).map_err(Failure::Connect)?);
            let target = Target::named(&address, settings).map_err(Failure::Connect)?;
            Self::connect(address, settings, target)
        });
        // Not with the address, which may hold a password.
        connected.map_err(|failure| failure.raised(py, ""))
    }

    /// Connect again to the same server, with the same settings.
    ///
    /// What is registered with this client is with the new one, too, and what will be: their connections are in one protection domain, so
    /// memory is registered once. This also works after this client has lost its connection, but not after `close()`.
    ///
    /// Raises:
    ///     ConnectError: The server cannot be reached, or refuses the password or the database.
    ///     ConnectionLost: This client was closed.
    fn another(&self, py: Python<'_>) -> PyResult<Self> {
        let connected = py.detach(|| {
            let target = lock(&self.target).clone().ok_or(Failure::Closed)?;
            Self::connect(Arc::clone(&self.address), self.settings, target)
        });
        connected.map_err(|failure| failure.raised(py, self.url()))
    }

    /// Register a writable buffer, so that values land in it and are sent from it without a copy.
    ///
    /// Registering pins the memory, which takes about as long as copying it: do it once for memory that is used often. Parts of
    /// the buffer (a slice of a memoryview, a view of an array) are recognised by their address and need no registration of their own.
    /// No other call registers anything. Over TCP everything is copied, registered or not.
    ///
    /// Until `unregister()`, or until this client and all that `another()` made are closed, the object is kept alive and refuses to be
    /// resized (`BufferError`), and the server can write to the memory at any time: one that obeys the protocol writes only values
    /// that were asked for. Register a buffer with one server only, and change it while no command uses it.
    ///
    /// Args:
    ///     buffer: The buffer.
    ///     slice_length: Bytes of a registration; None for one registration of the whole buffer. Some cards are slow with one
    ///         registration of many GiB. Up to two windows of a value are copied for each slice that the value touches.
    ///
    /// Raises:
    ///     BufferError: The buffer is read-only, not contiguous or empty, or some of it is registered already.
    ///     RegistrationError: The memory cannot be registered; the message says which limit is in the way.
    ///     ConnectionLost: The connection is lost, or was closed.
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
        let registered = py.detach(|| match &mut *lock(&self.line) {
            State::Open(link) => link.register(memory),
            State::Lost(reason) => Err(Failure::Lost(reason.clone())),
            State::Closed => Err(Failure::Closed),
        });
        match registered {
            Ok(true) => Ok(()),
            Ok(false) => Err(PyBufferError::new_err("some of the buffer is registered already")),
            Err(failure) => Err(failure.raised(py, self.url())),
        }
    }

    /// Undo `register()`: the buffer is the caller's alone when this returns, unless a command of another thread uses it; then it is
    /// when that command ends.
    ///
    /// Raises:
    ///     BufferError: No registered buffer begins where this one does.
    fn unregister(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let address = Memory::of(buffer)?.start().addr();
        let unregistered = py.detach(|| {
            let target = lock(&self.target).clone();
            target.is_some_and(|target| target.unregister(address))
        });
        if unregistered { Ok(()) } else { Err(PyBufferError::new_err("the buffer is not registered")) }
    }

    /// Get a value into a writable, contiguous buffer, from its first byte on.
    ///
    /// A shorter value leaves the end of the buffer as it was. When this returns or raises, whatever it raises, the command does not use
    /// the buffer any more; after an error, its contents are undefined.
    ///
    /// Returns:
    ///     The length of the value in bytes; None if there is no such key.
    ///
    /// Raises:
    ///     ValueTooLong: The value is longer than the buffer. It was read and dropped; the client can be used further.
    ///     Refused: The server refused the command; the client can be used further.
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    fn get_into(&self, py: Python<'_>, key: Key, buffer: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let mut pieces = Pieces::new([Memory::writable(buffer)?]);
        self.command(py, |link| link.get_into(&key.0, &mut pieces))
    }

    /// Get a value as new bytes, which are not registered memory. It asks for the length first.
    ///
    /// Returns:
    ///     The value; None if there is no such key.
    ///
    /// Raises:
    ///     Refused: The server refused the command; the client can be used further.
    ///     ValueTooLong: The value has more than 512 MiB, or grew each of the three times that it was asked for.
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
                // It has grown since it was asked how long it is.
                Err(error) if more > 0 && error.is_instance_of::<raised::ValueTooLong>(py) => {
                    more -= 1;
                    room = error.value(py).getattr("length")?.extract::<usize>()?.min(LONGEST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Get many values, each into a buffer of its own; commands are sent as far ahead of the replies as the server takes them.
    ///
    /// Args:
    ///     parts: Pairs of a key and a writable, contiguous buffer.
    ///
    /// Returns:
    ///     For each pair the length of the value in bytes, None if there is no such key, or the error of this one: `ValueTooLong` or
    ///     `Refused`.
    ///
    /// Raises:
    ///     ConnectionLost: The connection ended, or `timeout` passed (CommandTimeout).
    fn mget_into(&self, py: Python<'_>, parts: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyAny>>> {
        let (keys, mut pieces) = pairs(parts, Memory::writable)?;
        let parts = named_parts(&keys, &pieces);
        told(py, self.command(py, |link| link.mget_into(&parts, &mut pieces))?.into_iter())
    }

    /// Set a key to the bytes of a contiguous buffer. When this returns or raises, the command does not use the buffer any more.
    ///
    /// Args:
    ///     key: The key.
    ///     buffer: Its value.
    ///     ttl: Seconds that the key lives, in steps of a millisecond; None for ever.
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

    /// Set a key to a `str`, which is encoded in UTF-8, or to bytes; otherwise as `set_from`.
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

    /// Set many keys, each to the bytes of a buffer of its own; commands are sent as far ahead of the replies as the server takes them.
    ///
    /// Args:
    ///     parts: Pairs of a key and a contiguous buffer.
    ///     ttl: Seconds that the keys live, in steps of a millisecond; None for ever.
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

    /// Count how many of these keys there are; one that is named twice counts twice.
    #[pyo3(signature = (*keys))]
    fn exists(&self, py: Python<'_>, keys: &Bound<'_, PyTuple>) -> PyResult<u64> {
        let keys = several(keys)?;
        let keys: Vec<&[u8]> = keys.iter().map(|key| &*key.0).collect();
        self.command(py, |link| link.exists(&keys))
    }

    /// Tell of each key whether it is there; the questions are sent ahead of the answers.
    #[pyo3(signature = (*keys))]
    fn present(&self, py: Python<'_>, keys: &Bound<'_, PyTuple>) -> PyResult<Vec<bool>> {
        let keys = several(keys)?;
        let keys: Vec<&[u8]> = keys.iter().map(|key| &*key.0).collect();
        self.command(py, |link| link.present(&keys))
    }

    /// Delete keys. Returns how many there were.
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

    /// Ask every node how much memory it uses (`INFO memory`).
    ///
    /// Returns:
    ///     For each node, by its address, a dict of `used_memory` and `maxmemory` in bytes; the latter is 0 where nothing limits it.
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

    /// Counts of how the bytes of values went, as of the last command that has ended.
    #[getter]
    fn counts(&self) -> Counts {
        Counts::from(lock(&self.counts).0)
    }

    /// What the nodes of a cluster have told this client, as of the last command: keys that had `moved`, that it was `asked` to look for
    /// elsewhere, that were `repeated` since their node was lost or did not serve them then; how often it `refreshed` its map of the
    /// slots; and how often it `connected` to a node. None if this is no client of a cluster.
    #[getter]
    fn routing<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(routing) = lock(&self.counts).1 else { return Ok(None) };
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

    /// What the connections are made of: `rdma`, `tcp` or `embedded`. None once the client was closed.
    #[getter]
    fn transport(&self, py: Python<'_>) -> Option<&'static str> {
        match py.detach(|| lock(&self.target).as_ref().and_then(Target::way))? {
            Way::Rdma => Some("rdma"),
            Way::Tcp(_) => Some("tcp"),
            Way::Embedded => Some("embedded"),
        }
    }

    /// Why a client of `valkey://` does not use RDMA; None if it does, or was not asked to.
    #[getter]
    fn no_rdma(&self, py: Python<'_>) -> Option<String> {
        match py.detach(|| lock(&self.target).as_ref().and_then(Target::way))? {
            Way::Tcp(reason) => reason,
            _ => None,
        }
    }

    /// How many buffers are registered with this client and all that `another()` made.
    #[getter]
    fn registrations(&self, py: Python<'_>) -> usize {
        py.detach(|| lock(&self.target).as_ref().map_or(0, Target::registrations))
    }

    /// Close the connection, after the command that is under way. Buffers stay registered for as long as a client is open that
    /// `another()` made, or that made this one.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            // In this order: a connection ends before what is registered for it goes. What goes attaches to the interpreter to give buffers
            // back, so no lock is held by then that anybody waits for who is attached.
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
    /// One that nobody has closed is closed while other Python threads run, too: the connection's end is waited for, and what was
    /// registered is deregistered.
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}

/// A key: `bytes`, or a `str` that is encoded in UTF-8.
struct Key(Vec<u8>);

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

/// Returns the keys, and the memory that `of` makes of the buffers, of an iterable of pairs.
fn pairs(
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

/// Returns each piece with its key.
fn named_parts<'a>(keys: &'a [Key], pieces: &Pieces) -> Vec<Part<'a>> {
    keys.iter().zip(pieces.ranges()).map(|(key, range)| Part { key: &key.0, range }).collect()
}

/// Returns results as Python has them: a length, None, or an exception that was not raised.
fn told(
    py: Python<'_>,
    results: impl Iterator<Item = Result<Option<usize>, rdma_kv::Error>>,
) -> PyResult<Vec<Py<PyAny>>> {
    let told = results.map(|result| match result {
        Ok(len) => Ok(len.into_pyobject(py)?.into_any().unbind()),
        Err(error) => Ok(Failure::from(error).raised(py, "").into_value(py).into_any()),
    });
    told.collect()
}

/// Returns the keys of a command that takes at least one.
fn several(keys: &Bound<'_, PyTuple>) -> PyResult<Vec<Key>> {
    if keys.is_empty() {
        return Err(PyTypeError::new_err("at least one key is needed"));
    }
    keys.iter().map(|key| key.extract()).collect()
}

fn lives(ttl: Option<f64>) -> PyResult<Option<Duration>> {
    ttl.map(|seconds| duration("ttl", seconds)).transpose()
}

fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    let valid = Duration::try_from_secs_f64(seconds).ok().filter(|duration| !duration.is_zero());
    valid.ok_or_else(|| PyValueError::new_err(format!("{name} must be a number of seconds above 0")))
}
