//! The RDB of a primary, as it arrives.
//!
//! A primary with `rdbchecksum no` writes zeros in place of the checksum. Nothing that reads the
//! RDB later could see damage. So the checksum is computed here and takes their place: every RDB
//! that is published has one. The primary reads from its memory, and TCP has checked the way here.

use std::io;

use crc::{Digest, Table};

use super::link::Link;
use crate::rdb::{CHECKSUM, checksum};
use crate::wait::Limit;

/// Bytes of the mark after an RDB of unknown length.
pub(super) const MARK: usize = 40;

/// The end of an RDB.
pub(super) enum End {
    /// It has so many bytes more.
    After(u64),
    /// These bytes follow it.
    Mark([u8; MARK]),
}

/// The part of an RDB that has not been handed over.
pub(super) struct Arriving {
    end: End,
    /// Read bytes that may be a part of the mark, or of the checksum.
    held: Vec<u8>,
    /// How many of them are held back.
    keep: usize,
    /// Of an RDB that may have no checksum.
    digest: Option<Digest<'static, u64, Table<16>>>,
    is_over: bool,
}

impl Arriving {
    /// `is_summed` says that the primary computes checksums.
    pub(super) fn new(end: End, is_summed: bool) -> Self {
        let digest = (!is_summed).then(checksum);
        let keep = if matches!(end, End::Mark(_)) { MARK } else { 0 };
        let keep = keep + if is_summed { 0 } else { CHECKSUM };
        Self { end, held: Vec::new(), keep, digest, is_over: false }
    }

    /// Returns the number of bytes to come, if it is known.
    pub(super) const fn left(&self) -> Option<u64> {
        if let End::After(left) = self.end { Some(left) } else { None }
    }

    /// Reads more; `None` at the end.
    ///
    /// # Errors
    /// The primary has stopped sending, or the connection failed.
    pub(super) fn read(
        &mut self,
        into: &mut [u8],
        link: &mut Link,
        limit: &Limit,
    ) -> io::Result<Option<usize>> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the primary stopped sending its snapshot");
        loop {
            let ready = self.take(into);
            if ready > 0 || self.is_over {
                return Ok((ready > 0).then_some(ready));
            }
            if self.has_ended() {
                self.finish();
                continue;
            }
            // Read directly into place, after the held bytes, if they and as many fit there.
            let mut short = [0; 2 * (MARK + CHECKSUM)];
            let is_direct = into.len() > short.len();
            let buffer = if is_direct { &mut *into } else { &mut short };
            let (before, rest) = buffer.split_at_mut(self.held.len().min(buffer.len()));
            before.copy_from_slice(&self.held);
            let most = self.left().map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
            let room = most.min(rest.len());
            let count = link.read(rest.get_mut(..room).unwrap_or_default(), limit)?.ok_or_else(late)?;
            if let End::After(left) = &mut self.end {
                *left = left.saturating_sub(count as u64);
            }
            let come = self.held.len().saturating_add(count);
            let ready = if is_direct { come.saturating_sub(self.keep) } else { 0 };
            self.held = buffer.get(ready..come).unwrap_or_default().to_vec();
            if ready > 0 {
                self.sum(into.get(..ready).unwrap_or_default());
                return Ok(Some(ready));
            }
        }
    }

    /// Hands over held bytes. Returns their number.
    fn take(&mut self, into: &mut [u8]) -> usize {
        let ready = self.held.len().saturating_sub(self.keep).min(into.len());
        for (to, from) in into.iter_mut().zip(self.held.drain(..ready)) {
            *to = from;
        }
        self.sum(into.get(..ready).unwrap_or_default());
        ready
    }

    fn sum(&mut self, bytes: &[u8]) {
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
    }

    fn has_ended(&self) -> bool {
        match &self.end {
            End::After(left) => *left == 0,
            End::Mark(mark) => self.held.ends_with(mark),
        }
    }

    /// Lets the held bytes go that belong to the RDB.
    fn finish(&mut self) {
        if let End::Mark(mark) = &self.end {
            self.held.truncate(self.held.len().saturating_sub(mark.len()));
        }
        if let Some(digest) = self.digest.take()
            && self.held == [0; CHECKSUM]
        {
            self.held = digest.finalize().to_le_bytes().to_vec();
        }
        self.keep = 0;
        self.is_over = true;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use crate::rdb::tests::{EMPTY, unsummed};
    use crate::wait::Stop;

    /// Returns an RDB that a primary sends, as it arrives.
    fn arrives(sent: &[u8], end: End, is_summed: bool, room: usize) -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut primary = TcpStream::connect(listener.local_addr().expect("a port")).expect("a listener");
        let mut link = Link::new(listener.accept().expect("a primary").0).expect("a link");
        primary.write_all(sent).expect("it is taken");
        primary.shutdown(Shutdown::Write).expect("it is taken");
        let limit = Limit::new(&Stop::default(), Duration::from_secs(600));
        let (mut arriving, mut all, mut into) = (Arriving::new(end, is_summed), Vec::new(), vec![0; room]);
        while let Some(count) = arriving.read(&mut into, &mut link, &limit).expect("it arrives") {
            assert!(count > 0);
            all.extend_from_slice(&into[..count]);
        }
        all
    }

    /// An RDB without checksum gets one, by either kind of end, however it is read. One that has a
    /// checksum stays as it is, even a wrong one, and so does what is too short to be an RDB.
    #[test]
    fn an_rdb_without_checksum_gets_one() {
        let (unsummed, mut wrong) = (unsummed(), EMPTY.to_vec());
        wrong[EMPTY.len() - 1] ^= 1;
        for (sent, expected) in
            [(&unsummed[..], EMPTY), (EMPTY, EMPTY), (&wrong, &wrong), (&[0; 3], &[0; 3]), (&[], &[])]
        {
            for room in [1, 7, 8, 9, 48, 96, 97, 1000] {
                let end = End::After(sent.len() as u64);
                assert_eq!(arrives(sent, end, false, room), expected);
                assert_eq!(
                    arrives(&[sent, &[b'm'; MARK]].concat(), End::Mark([b'm'; MARK]), false, room),
                    expected
                );
                // A primary that computes checksums is not doubted here: readers check.
                assert_eq!(arrives(sent, End::After(sent.len() as u64), true, room), sent);
                assert_eq!(
                    arrives(&[sent, &[b'm'; MARK]].concat(), End::Mark([b'm'; MARK]), true, room),
                    sent
                );
            }
        }
    }
}
