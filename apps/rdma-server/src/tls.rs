//! TLS over any other connection type, RDMA among them.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

use crate::address::Address;
use crate::transport::{Accepted, ConnectionType, Interest, Kind, Listening, LoopId, Source, Transport};

/// Identity, trusted roots and cryptography of [`Tls`]. Start from [`TlsSettings::default`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TlsSettings {
    /// For accepted connections.
    pub server: Option<Arc<ServerConfig>>,
    /// For outgoing connections.
    pub client: Option<Arc<ClientConfig>>,
    /// The expected name in the server's certificate. By default, the address of the connect.
    pub server_name: Option<ServerName<'static>>,
}

impl TlsSettings {
    rdma_proto::setters! {
        server: Option<Arc<ServerConfig>>,
        client: Option<Arc<ClientConfig>>,
        server_name: Option<ServerName<'static>>,
    }
}

/// TLS over the connection type `T`.
#[derive(Clone, Debug)]
pub struct Tls<T> {
    inner: T,
    settings: Arc<Mutex<TlsSettings>>,
}

impl<T: ConnectionType> Tls<T> {
    /// Returns TLS over `inner`.
    pub fn new(inner: T, settings: TlsSettings) -> Self {
        Self { inner, settings: Arc::new(Mutex::new(settings)) }
    }

    /// Returns the inner type, for its own settings.
    pub const fn inner(&self) -> &T {
        &self.inner
    }
}

fn locked(settings: &Mutex<TlsSettings>) -> MutexGuard<'_, TlsSettings> {
    settings.lock().unwrap_or_else(PoisonError::into_inner)
}

fn missing(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, format!("TLS has no {what}: give it one with its settings"))
}

/// Converts an error of rustls. It concerns what the peer sent, and ends the connection.
fn fault(error: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl<T: ConnectionType> ConnectionType for Tls<T> {
    type Settings = TlsSettings;

    fn kind(&self) -> Kind {
        Kind { tls: true, ..self.inner.kind() }
    }

    fn configure(&self, settings: TlsSettings) -> io::Result<()> {
        *locked(&self.settings) = settings;
        Ok(())
    }

    fn listen(&self, on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>> {
        if locked(&self.settings).server.is_none() {
            return Err(missing("server configuration"));
        }
        let inner = self.inner.listen(on, at)?;
        Ok(Box::new(TlsListener { inner, settings: Arc::clone(&self.settings) }))
    }

    fn connect(&self, on: LoopId, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        let TlsSettings { client, server_name, .. } = locked(&self.settings).clone();
        let client = client.ok_or_else(|| missing("client configuration"))?;
        let name = match (server_name, to) {
            (Some(name), _) => name,
            (None, Address::Ip(address)) => ServerName::IpAddress(address.ip().into()),
            (None, Address::Unix(_)) => return Err(missing("server name to expect behind a Unix socket")),
        };
        let tls = ClientConnection::new(client, name).map_err(fault)?;
        Ok(Box::new(TlsTransport::new(self.inner.connect(on, to, from)?, tls.into())))
    }
}

struct TlsListener {
    inner: Box<dyn Listening>,
    settings: Arc<Mutex<TlsSettings>>,
}

impl Listening for TlsListener {
    fn accept(&mut self) -> io::Result<Accepted> {
        let inner = match self.inner.accept()? {
            Accepted::Connection(inner) => inner,
            other => return Ok(other),
        };
        let server = locked(&self.settings).server.clone();
        let tls = server
            .ok_or_else(|| missing("server configuration"))
            .and_then(|server| ServerConnection::new(server).map_err(fault));
        Ok(match tls {
            Ok(tls) => Accepted::Connection(Box::new(TlsTransport::new(inner, tls.into()))),
            // Not an error of the listener: settings may change before the next peer.
            Err(error) => Accepted::Lost(error),
        })
    }

    fn local_addr(&self) -> Option<Address> {
        self.inner.local_addr()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.inner.descriptor()
    }
}

struct TlsTransport {
    inner: Box<dyn Transport>,
    tls: rustls::Connection,
    /// The inner transport is connected, so the handshake can continue.
    carried: bool,
    /// Decrypted bytes that were not read yet.
    unread: usize,
    /// The inner transport has ended.
    ended: bool,
    /// This side has sent `close_notify`.
    ending: bool,
    /// The connection is closing and is not read any more.
    closing: bool,
    /// The inner transport takes nothing any more. The next write returns an error.
    broken: bool,
    /// The step to take once everything encrypted has left, with its time limit.
    after_flush: Option<(AfterFlush, Duration)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterFlush {
    Shutdown,
    Close,
}

/// The inner transport, in the form that rustls needs.
struct CiphertextIo<'a>(&'a mut dyn Transport);

impl Read for CiphertextIo<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for CiphertextIo<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.write(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        // A transport holds nothing back.
        Ok(())
    }
}

impl TlsTransport {
    fn new(inner: Box<dyn Transport>, tls: rustls::Connection) -> Self {
        Self {
            inner,
            tls,
            carried: false,
            unread: 0,
            ended: false,
            ending: false,
            closing: false,
            broken: false,
            after_flush: None,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut CiphertextIo(&mut *self.inner)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => {
                    self.broken = true;
                    return Err(error);
                }
            }
        }
        match self.after_flush.take() {
            Some((AfterFlush::Shutdown, linger)) => self.inner.shutdown(linger),
            Some((AfterFlush::Close, linger)) => self.inner.begin_close(linger),
            None => {}
        }
        Ok(())
    }

    /// Decrypts arrived bytes until there is something to read.
    fn take(&mut self) -> io::Result<()> {
        while self.unread == 0 && !self.ended {
            match self.tls.read_tls(&mut CiphertextIo(&mut *self.inner)) {
                // rustls has seen it, too: its reader fails if no `close_notify` came before.
                Ok(0) => self.ended = true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
            match self.tls.process_new_packets() {
                Ok(state) => {
                    self.unread = state.plaintext_bytes_to_read();
                    self.ended |= state.peer_has_closed();
                }
                Err(error) => {
                    // Tells the peer why, if possible.
                    let _ = self.flush();
                    return Err(fault(error));
                }
            }
            // Arrived bytes can be read even if nothing can be sent. The next write fails.
            let _ = self.flush();
        }
        Ok(())
    }

    fn end(&mut self, after: AfterFlush, linger: Duration) {
        // Nothing can be sent before the inner transport is connected.
        if self.carried {
            self.tls.send_close_notify();
        }
        self.ending = true;
        self.after_flush = Some((after, linger));
        // Bytes that do not leave now will leave when there is room, or their peer is gone.
        let _ = self.flush();
    }
}

impl Transport for TlsTransport {
    fn kind(&self) -> Kind {
        Kind { tls: true, ..self.inner.kind() }
    }

    fn set_waker(&mut self, waker: &Waker) {
        self.inner.set_waker(waker);
    }

    fn economize(&mut self) {
        self.inner.economize();
    }

    fn establish(&mut self) -> io::Result<bool> {
        if !self.carried {
            self.carried = self.inner.establish()?;
        }
        if !self.carried {
            return Ok(false);
        }
        self.flush()?;
        if self.tls.is_handshaking() {
            self.take()?;
            self.flush()?;
        }
        if self.tls.is_handshaking() && self.ended {
            let early = "the peer has left in the middle of the TLS handshake";
            return Err(io::Error::new(ErrorKind::UnexpectedEof, early));
        }
        Ok(!self.tls.is_handshaking())
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.take()?;
        let read = match self.tls.reader().read(into) {
            // An unannounced end may be an attack, but not after this side has announced one.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof && self.ending => 0,
            read => read?,
        };
        self.unread = self.unread.saturating_sub(read);
        Ok(read)
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        // `close_notify` ends one direction (RFC 8446, section 6.1), as the end of a socket does.
        if self.ending || (self.ended && !self.half_closes()) {
            return Err(ErrorKind::BrokenPipe.into());
        }
        self.flush()?;
        // At most one write waits in encrypted form.
        if self.tls.wants_write() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let written = self.tls.writer().write_vectored(from)?;
        self.flush()?;
        Ok(written)
    }

    fn half_closes(&self) -> bool {
        self.inner.half_closes()
    }

    /// Without `close_notify`, the peer sees that the end is none in order.
    fn reset(&mut self) {
        self.inner.reset();
    }

    fn shutdown(&mut self, linger: Duration) {
        self.end(AfterFlush::Shutdown, linger);
    }

    fn begin_close(&mut self, linger: Duration) {
        self.closing = true;
        self.end(AfterFlush::Close, linger);
    }

    fn is_over(&mut self) -> bool {
        let lost = self.flush().is_err();
        lost || (self.after_flush.is_none() && self.inner.is_over())
    }

    fn local_addr(&self) -> Option<Address> {
        self.inner.local_addr()
    }

    fn peer_addr(&self) -> Option<Address> {
        self.inner.peer_addr()
    }

    fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    fn peer_certificate(&self) -> Option<&[u8]> {
        self.tls.peer_certificates()?.first().map(AsRef::as_ref)
    }

    fn source(&self, want: Interest) -> Source<'_> {
        let want = if self.carried {
            let handshaking = self.tls.is_handshaking() && !want.is_none();
            Interest { read: want.read || handshaking, write: self.tls.wants_write() }
        } else {
            want
        };
        self.inner.source(want)
    }

    fn drive(&mut self, fired: Interest) {
        self.inner.drive(fired);
        if self.carried {
            // The next write returns the error.
            let _ = self.flush();
        }
    }

    fn ready(&mut self) -> Interest {
        if self.closing {
            // Unsent bytes wait for room in the inner transport, which then closes.
            return if self.after_flush.is_some() { Interest::NONE } else { self.inner.ready() };
        }
        Interest {
            // What the inner transport has may be a part of a record: the read then finds nothing.
            read: self.unread > 0 || self.ended || self.inner.ready().read,
            write: self.broken || !self.tls.wants_write(),
        }
    }
}
