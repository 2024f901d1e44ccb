//! Sends packets and descriptors over a Unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::MAX_MESSAGE;

/// Why a message was not exchanged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side has closed the socket.
    #[error("the other side has ended the session")]
    Closed,
    /// The packet is not a valid message.
    #[error("a message cannot be understood: {0}")]
    Malformed(#[from] postcard::Error),
    /// The message is longer than [`MAX_MESSAGE`], or has more than one descriptor.
    #[error("a message is longer than {MAX_MESSAGE} bytes")]
    TooLong,
    /// The ring of posts has what cannot be ([`Posts`](crate::Posts)).
    #[error("the ring of posts has what cannot be")]
    Ring,
    /// The operating system reported an error.
    #[error("socket: {0}")]
    System(#[from] Errno),
}

/// One end of a session.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl Socket {
    /// Connects to the fabric that listens at `path`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let fd = socket()?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self::new(fd))
    }

    /// Makes an end from a connected socket.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, buffer: vec![0; MAX_MESSAGE] }
    }

    /// Returns the process and the user at the other end, as the kernel knows them (`SO_PEERCRED`,
    /// `unix(7)`).
    pub fn peer(&self) -> Result<(u32, u32), Error> {
        let credentials = rustix::net::sockopt::socket_peercred(&self.fd)?;
        Ok((credentials.pid.as_raw_nonzero().get().unsigned_abs(), credentials.uid.as_raw()))
    }

    /// Sends a message, and a descriptor with it if there is one. Waits until it has room.
    pub fn send(
        &mut self,
        message: &impl Serialize,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL)
    }

    /// Sends an answer like [`Socket::send`], and does not wait for room: there is always room for
    /// the only answer that a program waits for.
    pub fn answer(
        &mut self,
        message: &impl Serialize,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with(
        &mut self,
        message: &impl Serialize,
        descriptor: Option<BorrowedFd<'_>>,
        flags: SendFlags,
    ) -> Result<(), Error> {
        let bytes = encode(message, &mut self.buffer)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let rights: &[BorrowedFd<'_>] = descriptor.as_slice();
        if !rights.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(rights));
        }
        match retry(|| rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut ancillary, flags)) {
            Ok(_) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::Closed),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for a message and takes its first descriptor; others are closed.
    pub fn receive<'a, T: Deserialize<'a>>(&'a mut self) -> Result<(T, Option<OwnedFd>), Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = retry(|| {
            let mut slices = [IoSliceMut::new(&mut self.buffer)];
            rustix::net::recvmsg(&self.fd, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        });
        let received = match received {
            Ok(received) if received.bytes > 0 => received,
            Ok(_) | Err(Errno::CONNRESET) => return Err(Error::Closed),
            Err(errno) => return Err(errno.into()),
        };
        let mut descriptor = None;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptor = rights.into_iter().next();
            }
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(Error::TooLong);
        }
        let bytes = self.buffer.get(..received.bytes).unwrap_or_default();
        Ok((postcard::from_bytes(bytes)?, descriptor))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Encodes a message into the buffer.
pub(crate) fn encode<'a>(message: &impl Serialize, buffer: &'a mut [u8]) -> Result<&'a [u8], Error> {
    match postcard::to_slice(message, buffer) {
        Ok(bytes) => Ok(bytes),
        Err(postcard::Error::SerializeBufferFull) => Err(Error::TooLong),
        Err(other) => Err(Error::Malformed(other)),
    }
}

/// Listens for programs.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Listens at `path`, which must not exist. The directory's permissions decide who may connect.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let fd = socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&fd, 128)?;
        Ok(Self { fd })
    }

    /// Waits for the next program.
    pub fn accept(&self) -> Result<Socket, Error> {
        let fd = retry(|| rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC))?;
        Ok(Socket::new(fd))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
