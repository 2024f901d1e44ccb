//! One large value over several connections.
//!
//! A value is received by a `GETRANGE` on each connection. The first one watches the key meanwhile
//! (`WATCH`), and its empty transaction says whether all parts are of one value. A value is sent by
//! a `SETRANGE` on each connection, to a new key that is renamed at the end.

use std::io;
use std::ops::Range;
use std::time::Duration;

use crate::client::{Client, Part, inside, lasting};
use crate::error::Error;
use crate::pipeline::Verb;
use crate::striped::{Striped, StripedBuffer};
use crate::transport::{Buffer, Transport};

/// The least bytes of a part. A shorter one saves less than another connection's round trip costs.
const SHORTEST: usize = 1 << 20;

const ATTEMPTS: usize = 3;

/// How long the parts of a value stay on the server after their calls' time-outs.
const LEFT: Duration = Duration::from_secs(60);

const LEFT_OF_ENDLESS: Duration = Duration::from_secs(24 * 3600);

impl<T: Transport + Send> Striped<T> {
    /// Gets one value into `range` of `buffer`, in parts over all connections if it has megabytes.
    /// Returns its length; `None` if there is no such key.
    ///
    /// All parts are of one value: they are received again if another client changes it meanwhile.
    /// Each of the steps is limited like a call.
    ///
    /// # Errors
    /// [`Error::Changed`] if the key was changed during each of three attempts, [`Error::TooLong`]
    /// if the value is longer than the range; otherwise the error of a connection. Lost connections
    /// are dropped. After an error the contents of the range are undefined.
    pub fn get_into(
        &mut self,
        key: &[u8],
        buffer: &mut StripedBuffer<T::Buffer>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        let whole = Part { key, range };
        inside(std::slice::from_ref(&whole), buffer)?;
        if self.cut(&whole).len() < 2 {
            return self.alone_into(&whole, buffer);
        }
        for _attempt in 0..ATTEMPTS {
            let connections = self.connections();
            let watched = self.first(|client| {
                client.ask_all(&[&[b"WATCH", key], &[b"STRLEN", key]], |client| {
                    let watched = lasting(client.status())?;
                    let len = lasting(client.natural())?;
                    watched.and(len)
                })
            });
            let got = watched.and_then(|len| Ok((len, self.parts_into(len, &whole, buffer)?)));
            if self.connections() < connections {
                // It may be the one that watches. Another one would find nothing changed.
                return Err(got.err().unwrap_or(Error::Lost));
            }
            // After an error, too, so that the key is watched no longer.
            let unchanged = self.first(|client| {
                client.ask_all(&[&[b"MULTI"], &[b"EXEC"]], |client| {
                    let begun = lasting(client.status())?;
                    let unchanged = lasting(client.executed(0))?;
                    begun.and(unchanged)
                })
            });
            let (len, got) = got?;
            if unchanged? && got.unwrap_or(0) as u64 == len {
                return Ok(got);
            }
        }
        Err(Error::Changed)
    }

    /// Sets a key to the bytes of `range`, in parts over all connections if there are megabytes of
    /// them, without a copy.
    ///
    /// Other clients find the old value until all parts have arrived, then the new one. Meanwhile
    /// the server also has the parts, in memory for a whole value, under a key that begins with
    /// `key` and ends with 32 random digits. It is deleted after an error, or expires some minutes
    /// later if its client is gone or a connection was lost. `RENAME` moves it, so on a node of a
    /// cluster the name of `key` needs a hash tag (`{…}`). Each step is limited like a call.
    ///
    /// # Errors
    /// [`Error::Changed`] if the server has evicted parts; otherwise the error of a connection, or
    /// of the system's random numbers. Lost connections are dropped. Unless the last step failed
    /// without an answer, the key has its old value.
    pub fn set_from(
        &mut self,
        key: &[u8],
        buffer: &StripedBuffer<T::Buffer>,
        range: Range<usize>,
    ) -> Result<(), Error> {
        let name = new_name(key)?;
        let whole = Part { key: &name, range };
        inside(std::slice::from_ref(&whole), buffer)?;
        if self.cut(&whole).len() < 2 {
            let mut set = self.mset_from(&[Part { key, ..whole }], buffer)?;
            return set.pop().unwrap_or(Ok(()));
        }
        let connections = self.connections();
        let sent = self.parts_from(&whole, buffer);
        // A lost connection's part may still be executed. After a DEL it would begin the key anew,
        // without an end, so the key is left to expire.
        let all_ended = sent.is_ok() || self.connections() == connections;
        let set = sent.and_then(|()| self.finish(&name, key));
        if set.is_err() && all_ended {
            let _expires_otherwise = self.first(|client| client.del(&[&name]));
        }
        set
    }

    /// Gets a value of `len` bytes in parts, or looks whether there is an empty one.
    fn parts_into(
        &mut self,
        len: u64,
        whole: &Part<'_>,
        buffer: &mut StripedBuffer<T::Buffer>,
    ) -> Result<Option<usize>, Error> {
        let Range { start, end } = whole.range;
        let room = end - start;
        match usize::try_from(len) {
            Ok(0) => self.alone_into(whole, buffer),
            Ok(len) if len <= room => {
                let parts = self.cut(&Part { range: start..start + len, ..whole.clone() });
                let got = self.spread(&parts, buffer, |client, parts, buffer| {
                    client.many_into(Verb::GetRange(start), parts, buffer)
                });
                Ok(Some(all(got?)?.into_iter().flatten().sum()))
            }
            _ => Err(Error::TooLong { len, room }),
        }
    }

    fn alone_into(
        &mut self,
        whole: &Part<'_>,
        buffer: &mut StripedBuffer<T::Buffer>,
    ) -> Result<Option<usize>, Error> {
        self.mget_into(std::slice::from_ref(whole), buffer)?.pop().unwrap_or(Ok(None))
    }

    fn parts_from(&mut self, whole: &Part<'_>, buffer: &StripedBuffer<T::Buffer>) -> Result<(), Error> {
        let (name, Range { start, end }) = (whole.key, whole.range.clone());
        let mut last = [0];
        if !buffer.read(end - 1, &mut last) {
            return Err(Error::Outside { start, end, len: buffer.len() });
        }
        let len = end - start;
        // Shorter if the server has evicted the last byte before this part came.
        let told = |client: &mut Client<T>| {
            if client.natural()? == len as u64 { Ok(()) } else { Err(Error::Changed) }
        };
        self.first(|client| {
            // The last byte comes first: the server allocates the whole value once.
            client.ask(&[b"SETRANGE", name, (len - 1).to_string().as_bytes(), &last], told)?;
            let lives = client.times().1.map_or(LEFT_OF_ENDLESS, |timeout| timeout.saturating_mul(2) + LEFT);
            let lives = lives.as_millis().min(LEFT_OF_ENDLESS.as_millis()).to_string();
            exists(client.ask(&[b"PEXPIRE", name, lives.as_bytes()], Client::natural)?)
        })?;
        let parts = self.cut(whole);
        let set = self.spread(&parts, buffer, |client, parts, buffer| {
            client.many_from(Verb::SetRange(start), parts, buffer, told)
        });
        all(set?).map(drop)
    }

    fn finish(&mut self, name: &[u8], key: &[u8]) -> Result<(), Error> {
        self.first(|client| {
            // If parts were evicted, the others have begun a key that does not expire.
            exists(client.ask(&[b"PTTL", name], Client::time_left)?)?;
            let lives = client.times().0.map(|lives| lives.to_string());
            let time: &[&[u8]] = match &lives {
                Some(lives) => &[b"PEXPIRE", name, lives.as_bytes()],
                None => &[b"PERSIST", name],
            };
            // Together, so that no client leaves a whole value without an end under this name.
            let commands: [&[&[u8]]; 4] = [&[b"MULTI"], time, &[b"RENAME", name, key], &[b"EXEC"]];
            client.ask_all(&commands, |client| {
                let [begun, first, second] =
                    [lasting(client.status())?, lasting(client.status())?, lasting(client.status())?];
                let queued = begun.and(first).and(second);
                match lasting(client.executed(2))? {
                    Ok(true) => {}
                    Ok(false) => return Err(Error::Changed),
                    Err(refused) => return queued.and(Err(refused)),
                }
                let (timed, renamed) = (lasting(client.natural())?, lasting(client.status())?);
                exists(timed?)?;
                renamed
            })
        })
    }

    fn first<R>(&mut self, act: impl FnOnce(&mut Client<T>) -> Result<R, Error>) -> Result<R, Error> {
        let done = self.clients.first_mut().ok_or(Error::Lost).and_then(act);
        self.drop_lost();
        done
    }

    /// Cuts a value into a part for each connection. None is empty; only the last may be shorter.
    fn cut<'a>(&self, whole: &Part<'a>) -> Vec<Part<'a>> {
        let Range { start, end } = whole.range;
        let count = self.connections().min((end - start) / SHORTEST).max(1);
        let len = (end - start).div_ceil(count).max(1);
        let part = |from| Part { key: whole.key, range: from..end.min(from + len) };
        (start..end).step_by(len).map(part).collect()
    }
}

fn all<R>(results: Vec<Result<R, Error>>) -> Result<Vec<R>, Error> {
    let (mut all, mut lost) = (Vec::with_capacity(results.len()), false);
    for result in results {
        match result {
            Ok(result) => all.push(result),
            // The connection's other part has the reason.
            Err(Error::Lost) => lost = true,
            Err(error) => return Err(error),
        }
    }
    if lost { Err(Error::Lost) } else { Ok(all) }
}

/// Returns an error if a command has found no key: the server has evicted it.
fn exists(found: u64) -> Result<(), Error> {
    if found > 0 { Ok(()) } else { Err(Error::Changed) }
}

/// Returns a key that no other client uses.
fn new_name(key: &[u8]) -> Result<Vec<u8>, Error> {
    // Of the system: numbers of this process would be those of its children, too.
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
    let digits = format!(":{:032x}", u128::from_ne_bytes(random));
    Ok([key, digits.as_bytes()].concat())
}
