use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use crate::address::Address;
use crate::transport::{
    Accepted, Carrier, ConnectionType, Interest, Kind, Listening, LoopId, Source, Transport, out_of_bounds,
};

/// Bytes that a closing socket discards per turn: unread bytes would turn the close into a reset.
const DISCARD: usize = 64 << 10;

/// Settings of sockets; [`Unix`] uses only the backlog. Start from [`SocketSettings::default`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketSettings {
    /// Connections that may wait to be accepted: at least 1.
    pub backlog: i32,
    /// Whether small writes are sent at once.
    pub no_delay: bool,
    /// Silence after which the kernel probes the peer: at least a second. It probes again after a
    /// third of that, but at most once a second.
    pub keepalive: Option<Duration>,
}

impl SocketSettings {
    rdma_proto::setters! {
        backlog: i32,
        no_delay: bool,
        keepalive: Option<Duration>,
    }

    fn check(&self) -> io::Result<()> {
        if self.backlog < 1 {
            return Err(out_of_bounds("SocketSettings::backlog must be at least 1"));
        }
        // The kernel counts seconds, tcp(7).
        if self.keepalive.is_some_and(|every| every < Duration::from_secs(1)) {
            return Err(out_of_bounds("SocketSettings::keepalive must be at least a second"));
        }
        Ok(())
    }
}

impl Default for SocketSettings {
    fn default() -> Self {
        Self { backlog: 511, no_delay: true, keepalive: Some(Duration::from_secs(300)) }
    }
}

/// TCP.
#[derive(Clone, Debug, Default)]
pub struct Tcp {
    settings: Arc<Mutex<SocketSettings>>,
}

/// Unix sockets.
#[derive(Clone, Debug, Default)]
pub struct Unix {
    settings: Arc<Mutex<SocketSettings>>,
}

fn read_settings(settings: &Mutex<SocketSettings>) -> SocketSettings {
    *settings.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tcp {
    /// Returns TCP with default settings.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Unix {
    /// Returns Unix sockets with default settings.
    pub fn new() -> Self {
        Self::default()
    }
}

fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl ConnectionType for Tcp {
    type Settings = SocketSettings;

    fn kind(&self) -> Kind {
        Kind { carrier: Carrier::Tcp, tls: false }
    }

    fn configure(&self, settings: SocketSettings) -> io::Result<()> {
        settings.check()?;
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        Ok(())
    }

    fn listen(&self, _on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>> {
        let address = at.ip()?;
        let socket = tcp_socket(address)?;
        // socket(7): connections of a former listener do not block the address.
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            // IPv4 has a listener of its own.
            socket.set_only_v6(true)?;
        }
        socket.bind(&address.into())?;
        socket.listen(read_settings(&self.settings).backlog)?;
        Ok(Box::new(Listener {
            socket,
            kind: self.kind(),
            settings: Arc::clone(&self.settings),
            _file: None,
        }))
    }

    fn connect(&self, _on: LoopId, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        let address = to.ip()?;
        let socket = tcp_socket(address)?;
        if let Some(from) = from {
            // socket(7): connections that have ended do not block the address.
            socket.set_reuse_address(true)?;
            socket.bind(&from.ip()?.into())?;
        }
        let stream = Stream::connect(socket, &address.into(), self.kind())?;
        stream.apply(&read_settings(&self.settings))?;
        Ok(Box::new(stream))
    }
}

impl ConnectionType for Unix {
    type Settings = SocketSettings;

    fn kind(&self) -> Kind {
        Kind { carrier: Carrier::Unix, tls: false }
    }

    fn configure(&self, settings: SocketSettings) -> io::Result<()> {
        settings.check()?;
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        Ok(())
    }

    fn listen(&self, _on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>> {
        let path = unix_path(at)?;
        let address = SockAddr::unix(&path)?;
        // unix(7): binding fails if the file exists, also without a server behind it.
        remove_leftover(&path, &address);
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address)?;
        socket.listen(read_settings(&self.settings).backlog)?;
        let settings = Arc::clone(&self.settings);
        let file = SocketFile::of(path);
        Ok(Box::new(Listener { socket, kind: self.kind(), settings, _file: file }))
    }

    fn connect(&self, _on: LoopId, to: &Address, _from: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        Ok(Box::new(Stream::connect(socket, &SockAddr::unix(unix_path(to)?)?, self.kind())?))
    }
}

fn unix_path(address: &Address) -> io::Result<PathBuf> {
    match address {
        Address::Unix(path) => Ok(path.clone()),
        Address::Ip(_) => Err(address.unsuitable("the path of a Unix socket")),
    }
}

/// The file of a bound Unix socket, which its drop removes, unless another has taken its place. The
/// socket keeps its inode alive, so no other file can have its number.
struct SocketFile {
    /// The process that listens. A forked child drops a copy.
    process: u32,
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: PathBuf) -> Option<Self> {
        let metadata = std::fs::symlink_metadata(&path).ok()?;
        Some(Self { process: process::id(), path, device: metadata.dev(), inode: metadata.ino() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (self.device, self.inode));
        if is_ours && self.process == process::id() {
            // If it cannot be removed, the next listener finds it without a server.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes the file of a dead server: a socket without a listener. Any other kind of file stays.
fn remove_leftover(path: &PathBuf, address: &SockAddr) {
    // Connecting to a file that is not a socket is refused as well.
    if !std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        return;
    }
    let refused = Socket::new(Domain::UNIX, Type::STREAM, None)
        .and_then(|socket| {
            socket.set_nonblocking(true)?;
            socket.connect(address)
        })
        .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    if refused {
        // If it cannot be removed, binding returns the reason.
        let _ = std::fs::remove_file(path);
    }
}

struct Listener {
    // The file drops first, while its inode cannot be reused.
    _file: Option<SocketFile>,
    socket: Socket,
    kind: Kind,
    settings: Arc<Mutex<SocketSettings>>,
}

impl Listener {
    fn prepare(&self, socket: Socket) -> io::Result<Stream> {
        // accept(2): the new socket does not inherit it.
        socket.set_nonblocking(true)?;
        let stream = Stream::new(socket, self.kind, Phase::Open);
        stream.apply(&read_settings(&self.settings))?;
        Ok(stream)
    }
}

impl Listening for Listener {
    fn accept(&mut self) -> io::Result<Accepted> {
        let accepted = self.socket.accept().and_then(|(socket, _peer)| self.prepare(socket));
        match accepted {
            Ok(stream) => Ok(Accepted::Connection(Box::new(stream))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Accepted::Nobody),
            Err(error) if is_out_of_resources(&error) => Err(error),
            Err(error) => Ok(Accepted::Lost(error)),
        }
    }

    fn local_addr(&self) -> Option<Address> {
        self.socket.local_addr().ok().map(address)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether the next accept will fail, too: other errors of `accept(2)` concern one connection.
fn is_out_of_resources(error: &io::Error) -> bool {
    let lacking = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::BADF, Errno::INVAL];
    lacking.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn address(address: SockAddr) -> Address {
    match address.as_socket() {
        Some(address) => Address::Ip(address),
        None => Address::Unix(address.as_pathname().map(Into::into).unwrap_or_default()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Open,
    /// Nothing more will come, after the end or an error.
    Ended,
}

struct Stream {
    socket: Socket,
    kind: Kind,
    phase: Phase,
    /// The readiness that the kernel reported last, until a call finds otherwise.
    ready: Interest,
}

impl Stream {
    const fn new(socket: Socket, kind: Kind, phase: Phase) -> Self {
        Self { socket, kind, phase, ready: Interest::NONE }
    }

    fn connect(socket: Socket, to: &SockAddr, kind: Kind) -> io::Result<Self> {
        match socket.connect(to) {
            Ok(()) => Ok(Self::new(socket, kind, Phase::Open)),
            // connect(2): the attempt continues, and the socket becomes writable at its end.
            Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
                Ok(Self::new(socket, kind, Phase::Connecting))
            }
            // A Unix socket whose backlog is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(io::Error::new(
                ErrorKind::ConnectionRefused,
                "too many connections wait to be accepted there",
            )),
            Err(error) => Err(error),
        }
    }

    fn apply(&self, settings: &SocketSettings) -> io::Result<()> {
        if self.kind.carrier == Carrier::Tcp {
            self.socket.set_tcp_nodelay(settings.no_delay)?;
            if let Some(every) = settings.keepalive {
                self.socket.set_tcp_keepalive(
                    &TcpKeepalive::new()
                        .with_time(every)
                        .with_interval((every / 3).max(Duration::from_secs(1))),
                )?;
            }
        }
        Ok(())
    }

    fn book(&mut self, result: &io::Result<usize>, wanted: usize) {
        match result {
            Ok(0) if wanted > 0 => self.phase = Phase::Ended,
            Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                self.phase = Phase::Ended;
            }
            _ => {}
        }
    }
}

impl Transport for Stream {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn establish(&mut self) -> io::Result<bool> {
        if self.phase == Phase::Connecting {
            // connect(2): `SO_ERROR` has the outcome.
            if let Some(error) = self.socket.take_error()? {
                self.phase = Phase::Ended;
                return Err(error);
            }
            match self.socket.peer_addr() {
                Ok(_) => self.phase = Phase::Open,
                // An early wake-up: the attempt has not ended.
                Err(error) if error.kind() == ErrorKind::NotConnected => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.phase != Phase::Connecting)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let result = (&self.socket).read(into);
        self.book(&result, into.len());
        self.ready.read &= !is_would_block(&result);
        result
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let result = (&self.socket).write_vectored(from);
        // Of a write, no bytes are no end.
        self.book(&result, 0);
        self.ready.write &= !is_would_block(&result);
        result
    }

    fn half_closes(&self) -> bool {
        true
    }

    fn reset(&mut self) {
        if self.kind.carrier == Carrier::Tcp {
            // socket(7): a close then discards what was not sent and resets the connection. A
            // Unix socket has one kind of end. If it cannot be set, the peer sees that one, too.
            let _ = self.socket.set_linger(Some(Duration::ZERO));
        }
    }

    fn shutdown(&mut self, _linger: Duration) {
        // It fails if the connection has already ended, which is the goal.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn begin_close(&mut self, _linger: Duration) {
        // The peer reads the rest and then the end. `is_over` awaits the peer's own.
        if self.phase == Phase::Open && self.socket.shutdown(Shutdown::Write).is_ok() {
            return;
        }
        self.phase = Phase::Ended;
    }

    fn is_over(&mut self) -> bool {
        let mut discarded = 0;
        let mut buffer = [0; 4096];
        while self.phase != Phase::Ended && discarded < DISCARD {
            match self.read(&mut buffer) {
                Ok(read) => discarded += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                // `book` has noted an end. After a signal it reads again.
                Err(_) => {}
            }
        }
        self.phase == Phase::Ended
    }

    fn local_addr(&self) -> Option<Address> {
        self.socket.local_addr().ok().map(address)
    }

    fn peer_addr(&self) -> Option<Address> {
        self.socket.peer_addr().ok().map(address)
    }

    fn is_local(&self) -> bool {
        match self.peer_addr() {
            // An IPv4 address may be mapped into IPv6.
            Some(Address::Ip(peer)) => peer.ip().to_canonical().is_loopback(),
            Some(Address::Unix(_)) => true,
            None => false,
        }
    }

    fn source(&self, want: Interest) -> Source<'_> {
        Source::Own(self.socket.as_fd(), want)
    }

    fn drive(&mut self, fired: Interest) {
        self.ready.read |= fired.read;
        self.ready.write |= fired.write;
    }

    fn ready(&mut self) -> Interest {
        self.ready
    }
}

fn is_would_block(result: &io::Result<usize>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_leaves_the_file_of_its_parent() {
        let path = std::env::temp_dir().join(format!("rdma-server-fork-{}", process::id()));
        std::fs::write(&path, "").expect("a file");
        let mut file = SocketFile::of(path.clone()).expect("is there");
        file.process += 1;
        drop(file);
        assert!(path.exists());
        drop(SocketFile::of(path.clone()));
        assert!(!path.exists());
    }
}
