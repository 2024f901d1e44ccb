//! A cluster client, which sends each key to the node of its slot.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Client, Counts, MemoryUse, Part, inside};
use crate::error::Error;
use crate::memory::Memory;
use crate::pipeline::Verb;
use crate::slots::{Elsewhere, Slots, slot};
use crate::transport::{Buffer, Deadline, Transport};

/// How often a key is tried at most: after each answer that redirects or delays it, and after a
/// connection is lost, if the command may be repeated.
const TURNS: u32 = 6;

/// The first pause before a key is tried again. Each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(25);

/// The shortest time between two requests for the map of slots. `MOVED` is recorded at once.
const SETTLED: Duration = Duration::from_secs(1);

const LONGEST_MAP: usize = 1 << 20;

/// Counts of a [`Cluster`]'s redirections and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Routing {
    /// Keys whose slot had moved (`MOVED`).
    pub moved: u64,
    /// Keys that another node served once (`ASK`).
    pub asked: u64,
    /// Keys that were tried again because their node was lost, or could not serve them then.
    pub repeated: u64,
    /// How often the map of slots was requested.
    pub refreshed: u64,
    /// Connections that were made.
    pub connected: u64,
}

/// A client of a cluster, with a connection to the primary of each slot that is used. Each
/// connection's part of a call runs on a thread of its own.
///
/// `D` connects to the node at an address, `HOST:PORT`, and returns a client that has logged in.
/// Over RDMA a node listens on the number of its TCP port, because Valkey announces only one. A
/// lost connection is established again when needed.
///
/// # What a lost connection means
/// Its node may have carried out the commands that had no reply yet, or may still do so. Reads are
/// sent again. SET and DEL are sent again only if [`Cluster::set_repeats`] allows it.
///
/// # What a node may do
/// A node names others by their addresses, and the client connects to these. So all nodes are
/// trusted with the user and the password. Their messages are checked and bounded: a key is tried 6
/// times at most; the map of slots has at most a MiB and 1000 nodes, and is requested at most once
/// a second and once for a new client. Every call ends by its time-out.
pub struct Cluster<T: Transport, D> {
    seeds: Vec<String>,
    dial: D,
    clients: BTreeMap<String, Client<T>>,
    slots: Slots,
    asked_at: Option<Instant>,
    timeout: Option<Duration>,
    lives: Option<Duration>,
    repeats: bool,
    /// The counts of lost clients.
    counts: Counts,
    routing: Routing,
}

/// Memory for the values of a [`Cluster`]. The first value to or from a node registers it there:
/// nodes do not share a protection domain.
#[derive(Debug)]
pub struct ClusterBuffer<U> {
    memory: Option<Memory>,
    handles: Vec<U>,
}

impl<U> ClusterBuffer<U> {
    /// Returns a buffer that all nodes' connections can use without registering it.
    pub fn of(buffer: U) -> Self {
        Self { memory: None, handles: vec![buffer] }
    }

    fn handle<T: Transport<Buffer = U>>(&mut self, client: &Client<T>) -> Result<U, Error>
    where
        U: Clone,
    {
        if let Some(handle) = self.handles.iter().find(|handle| client.stream().takes(handle)) {
            return Ok(handle.clone());
        }
        let memory = self.memory.as_ref().ok_or(Error::Foreign)?;
        let handle = client.register(memory.clone())?;
        self.handles.push(handle.clone());
        Ok(handle)
    }
}

impl<U: Buffer> Buffer for ClusterBuffer<U> {
    fn len(&self) -> usize {
        match &self.memory {
            Some(memory) => memory.len(),
            None => self.handles.first().map_or(0, U::len),
        }
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        match &self.memory {
            Some(memory) => Buffer::read(memory, offset, into),
            None => self.handles.first().is_some_and(|handle| handle.read(offset, into)),
        }
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        match &mut self.memory {
            // While a device or a server uses a handle, not even an empty slice can be written.
            Some(memory) => {
                self.handles.iter_mut().all(|handle| handle.write(0, &[]))
                    && Buffer::write(memory, offset, from)
            }
            None => self.handles.first_mut().is_some_and(|handle| handle.write(offset, from)),
        }
    }
}

struct Share<H> {
    indices: Vec<usize>,
    handle: H,
}

/// The answer to a key, and the node that sent it.
struct Answer<R> {
    /// The key's index in the call.
    index: usize,
    node: String,
    result: Result<R, Error>,
    /// Whether the node may have the command. If not, it can be sent again, whatever it does.
    sent: bool,
}

impl<T: Transport + Send, D: FnMut(&str) -> Result<Client<T>, Error>> Cluster<T, D> {
    /// Returns a client of the cluster that some of these nodes, `HOST:PORT` each, belong to. It
    /// connects when first used.
    pub fn new(seeds: impl IntoIterator<Item = impl Into<String>>, dial: D) -> Self {
        Self {
            seeds: seeds.into_iter().map(Into::into).collect(),
            dial,
            clients: BTreeMap::new(),
            slots: Slots::default(),
            asked_at: None,
            timeout: Some(Client::<T>::TIMEOUT),
            lives: None,
            repeats: false,
            counts: Counts::NONE,
            routing: Routing::default(),
        }
    }

    /// Limits how long each call may take, with all turns of all nodes. `D` limits connecting.
    pub const fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Limits how long keys live that are set from now on, like [`Client::set_time_to_live`].
    pub const fn set_time_to_live(&mut self, lives: Option<Duration>) {
        self.lives = lives;
    }

    /// Allows that SET and DEL are sent again after their connection is lost: by default they are
    /// not. Say so only if nothing changes in between, such as for keys that name their value.
    ///
    /// The first one may have been carried out, or may be carried out later. So a repeated SET can
    /// replace a newer value of another client, and the first one that of the repeated. A repeated
    /// DEL counts too few keys, and can delete a newer value.
    pub const fn set_repeats(&mut self, repeats: bool) {
        self.repeats = repeats;
    }

    /// Connects to every primary. Calls otherwise connect as needed.
    ///
    /// # Errors
    /// No node returns the map of slots, or one of the primaries cannot be connected to.
    pub fn connect(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(self.timeout);
        self.refresh(deadline)?;
        for node in self.slots.nodes().to_vec() {
            self.client(&node, deadline)?;
        }
        Ok(())
    }

    /// Returns how much memory each primary uses, by its address.
    ///
    /// # Errors
    /// No node returns the map of slots, or one of the primaries does not answer.
    pub fn memory(&mut self) -> Result<Vec<(String, MemoryUse)>, Error> {
        let deadline = Deadline::after(self.timeout);
        self.refresh(deadline)?;
        let nodes = self.slots.nodes().to_vec();
        let told = nodes.into_iter().map(|node| {
            let memory = self.client(&node, deadline)?.memory()?;
            Ok((node, memory))
        });
        told.collect()
    }

    /// Allocates `len` bytes of memory for values.
    pub fn buffer(&self, len: usize) -> ClusterBuffer<T::Buffer> {
        self.register(vec![0; len])
    }

    /// Takes existing memory for values, like [`Client::register`].
    pub fn register(&self, memory: impl Into<Memory>) -> ClusterBuffer<T::Buffer> {
        ClusterBuffer { memory: Some(memory.into()), handles: Vec::new() }
    }

    /// Returns the client of each connected node, by the node's address.
    pub fn clients(&self) -> impl Iterator<Item = (&str, &Client<T>)> {
        self.clients.iter().map(|(node, client)| (node.as_str(), client))
    }

    /// Returns the counts of all connections together.
    pub fn counts(&self) -> Counts {
        self.clients.values().fold(self.counts, |sum, client| sum + client.counts())
    }

    /// Returns the counts of redirections and connections.
    pub const fn routing(&self) -> Routing {
        self.routing
    }

    /// Gets a value into `range` of `buffer`, like [`Client::get_into`].
    ///
    /// # Errors
    /// Those of [`Client::get_into`], or no node serves the key. The client stays usable.
    pub fn get_into(
        &mut self,
        key: &[u8],
        buffer: &mut ClusterBuffer<T::Buffer>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        let mut lengths = self.mget_into(&[Part { key, range }], buffer)?;
        lengths.pop().unwrap_or(Ok(None))
    }

    /// Gets many values into parts of `buffer`, which do not overlap, like [`Client::mget_into`].
    /// If a connection fails too often, one of its keys has the error, the others [`Error::Lost`].
    ///
    /// # Errors
    /// A part is not inside the buffer, or no node returns the map of slots.
    pub fn mget_into(
        &mut self,
        parts: &[Part<'_>],
        buffer: &mut ClusterBuffer<T::Buffer>,
    ) -> Result<Vec<Result<Option<usize>, Error>>, Error> {
        self.forget(buffer);
        inside(parts, buffer)?;
        self.spread(parts, true, |client| buffer.handle(client), Client::mget_into)
    }

    /// Sets a key to the bytes of `range`, like [`Client::set_from`].
    ///
    /// # Errors
    /// Those of [`Client::set_from`], or no node serves the key. The client stays usable.
    pub fn set_from(
        &mut self,
        key: &[u8],
        buffer: &mut ClusterBuffer<T::Buffer>,
        range: Range<usize>,
    ) -> Result<(), Error> {
        let mut done = self.mset_from(&[Part { key, range }], buffer)?;
        done.pop().unwrap_or(Ok(()))
    }

    /// Sets many keys to parts of `buffer`, like [`Client::mset_from`]. If a connection is lost,
    /// one of its keys has the error, the others [`Error::Lost`]: they may be set or not, or be
    /// set later ([`Cluster::set_repeats`]).
    ///
    /// # Errors
    /// A part is not inside the buffer, or no node returns the map of slots.
    pub fn mset_from(
        &mut self,
        parts: &[Part<'_>],
        buffer: &mut ClusterBuffer<T::Buffer>,
    ) -> Result<Vec<Result<(), Error>>, Error> {
        self.forget(buffer);
        inside(parts, buffer)?;
        let (lives, repeats) = (self.lives, self.repeats);
        self.spread(
            parts,
            repeats,
            |client| buffer.handle(client),
            |client, parts, buffer| {
                client.set_time_to_live(lives);
                client.mset_from(parts, buffer)
            },
        )
    }

    /// Returns for each key whether it exists, or why that is not known.
    ///
    /// # Errors
    /// No node returns the map of slots.
    pub fn present(&mut self, keys: &[&[u8]]) -> Result<Vec<Result<bool, Error>>, Error> {
        let there = self.numbers(Verb::Exists, true, keys)?;
        Ok(there.into_iter().map(|there| there.map(|there| there > 0)).collect())
    }

    /// Returns how many of these keys exist.
    ///
    /// # Errors
    /// It is unknown for one of them.
    pub fn exists(&mut self, keys: &[&[u8]]) -> Result<u64, Error> {
        self.numbers(Verb::Exists, true, keys)?.into_iter().sum()
    }

    /// Deletes keys. Returns how many existed; too few if one was repeated
    /// ([`Cluster::set_repeats`]).
    ///
    /// # Errors
    /// It is unknown for one of them, for example because its connection is lost; that one and
    /// others may be deleted.
    pub fn del(&mut self, keys: &[&[u8]]) -> Result<u64, Error> {
        self.numbers(Verb::Del, self.repeats, keys)?.into_iter().sum()
    }

    /// Returns the length of a value, 0 if there is no such key.
    ///
    /// # Errors
    /// Those of [`Cluster::get_into`].
    pub fn strlen(&mut self, key: &[u8]) -> Result<u64, Error> {
        self.numbers(Verb::Strlen, true, &[key])?.pop().unwrap_or(Ok(0))
    }

    fn numbers(
        &mut self,
        verb: Verb,
        repeats: bool,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<u64, Error>>, Error> {
        let parts: Vec<Part<'_>> = keys.iter().map(|key| Part { key, range: 0..0 }).collect();
        self.spread(
            &parts,
            repeats,
            |_client| Ok(()),
            |client, parts, ()| {
                let keys: Vec<&[u8]> = parts.iter().map(|part| part.key).collect();
                client.numbers(verb, &keys)
            },
        )
    }

    fn forget(&self, buffer: &mut ClusterBuffer<T::Buffer>) {
        if buffer.memory.is_some() {
            buffer.handles.retain(|handle| self.clients.values().any(|client| client.stream().takes(handle)));
        }
    }

    /// Runs `act` for each part at its key's node until its final answer, at most [`TURNS`] times.
    /// `repeats` is whether the command may be carried out more than once.
    fn spread<H: Send, R: Send>(
        &mut self,
        parts: &[Part<'_>],
        repeats: bool,
        mut handle: impl FnMut(&Client<T>) -> Result<H, Error>,
        act: impl Fn(&mut Client<T>, &[Part<'_>], &mut H) -> Result<Vec<Result<R, Error>>, Error> + Sync,
    ) -> Result<Vec<Result<R, Error>>, Error> {
        let deadline = Deadline::after(self.timeout);
        if self.slots.nodes().is_empty() {
            self.refresh(deadline)?;
        }
        let mut results: Vec<Result<R, Error>> = parts.iter().map(|_| Err(Error::Lost)).collect();
        let mut open: Vec<usize> = (0..parts.len()).collect();
        for turn in 0..TURNS {
            let (mut again, mut pause) = (Vec::new(), false);
            for mut answer in self.turn(&open, parts, deadline, &mut handle, &act) {
                let index = answer.index;
                let Some(part) = parts.get(index) else { continue };
                if let Some(Elsewhere::Ask { node }) = answer.elsewhere(repeats) {
                    self.routing.asked += 1;
                    answer = self.ask(index, node, part, deadline, &mut handle, &act);
                }
                match answer.elsewhere(repeats) {
                    Some(Elsewhere::Moved { slot, node }) => {
                        self.routing.moved += 1;
                        self.slots.moved(slot, &node);
                        again.push(index);
                    }
                    Some(Elsewhere::Ask { .. } | Elsewhere::Later) => {
                        self.routing.repeated += 1;
                        pause = true;
                        again.push(index);
                    }
                    None => {}
                }
                if let Some(place) = results.get_mut(index) {
                    *place = answer.result;
                }
            }
            self.drop_lost();
            if again.is_empty() || turn + 1 == TURNS || self.rest(pause, turn, deadline).is_err() {
                break;
            }
            open = again;
        }
        Ok(results)
    }

    fn rest(&mut self, pause: bool, turn: u32, deadline: Deadline) -> Result<(), Error> {
        if pause {
            let pause = PAUSE * 2_u32.saturating_pow(turn);
            thread::sleep(deadline.left()?.map_or(pause, |left| left.min(pause)));
        }
        if self.asked_at.is_none_or(|at| at.elapsed() >= SETTLED) {
            // Without a new map the old one is used.
            _ = self.refresh(deadline);
        }
        deadline.left()?;
        Ok(())
    }

    fn turn<H: Send, R: Send>(
        &mut self,
        open: &[usize],
        parts: &[Part<'_>],
        deadline: Deadline,
        handle: &mut impl FnMut(&Client<T>) -> Result<H, Error>,
        act: &(impl Fn(&mut Client<T>, &[Part<'_>], &mut H) -> Result<Vec<Result<R, Error>>, Error> + Sync),
    ) -> Vec<Answer<R>> {
        let (mut answers, mut places) = (Vec::new(), BTreeMap::<String, Vec<usize>>::new());
        for index in open {
            let Some(part) = parts.get(*index) else { continue };
            let slot = slot(part.key);
            match self.slots.node(slot) {
                Some(node) => places.entry(node.into()).or_default().push(*index),
                None => answers.extend(all(vec![*index], "", false, Err(Error::Unserved { slot }))),
            }
        }
        let mut shares = BTreeMap::new();
        for (node, indices) in places {
            match self.client(&node, deadline).and_then(|client| handle(client)) {
                Ok(handle) => _ = shares.insert(node, Share { indices, handle }),
                Err(error) => answers.extend(all(indices, &node, false, Err(error))),
            }
        }
        let run = |node: &str, client: &mut Client<T>, mut share: Share<H>| {
            let own: Vec<Part<'_>> =
                share.indices.iter().filter_map(|index| parts.get(*index).cloned()).collect();
            let answers = act(client, &own, &mut share.handle);
            all(share.indices, node, true, answers)
        };
        let run = &run;
        let mut busy = self
            .clients
            .iter_mut()
            .filter_map(|(node, client)| Some((node.as_str(), client, shares.remove(node)?)))
            .collect::<Vec<_>>()
            .into_iter();
        answers.extend(thread::scope(|scope| {
            let first = busy.next();
            let others: Vec<_> =
                busy.map(|(node, client, share)| scope.spawn(move || run(node, client, share))).collect();
            let mut answers = first.map_or_else(Vec::new, |(node, client, share)| run(node, client, share));
            for other in others {
                answers.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            answers
        }));
        answers
    }

    fn ask<H, R>(
        &mut self,
        index: usize,
        node: String,
        part: &Part<'_>,
        deadline: Deadline,
        handle: &mut impl FnMut(&Client<T>) -> Result<H, Error>,
        act: &impl Fn(&mut Client<T>, &[Part<'_>], &mut H) -> Result<Vec<Result<R, Error>>, Error>,
    ) -> Answer<R> {
        let mut sent = false;
        let mut ask = || {
            let client = self.client(&node, deadline)?;
            client.asking()?;
            let mut handle = handle(client)?;
            sent = true;
            act(client, std::slice::from_ref(part), &mut handle)?.pop().unwrap_or(Err(Error::Lost))
        };
        let result = ask();
        Answer { index, node, result, sent }
    }

    fn client(&mut self, node: &str, deadline: Deadline) -> Result<&mut Client<T>, Error> {
        let left = deadline.left()?;
        let client = match self.clients.remove(node) {
            Some(client) if !client.is_lost() => client,
            gone => {
                self.counts = gone.iter().fold(self.counts, |sum, gone| sum + gone.counts());
                self.routing.connected += 1;
                (self.dial)(node)?
            }
        };
        let client = self.clients.entry(node.into()).or_insert(client);
        client.set_timeout(left);
        Ok(client)
    }

    fn refresh(&mut self, deadline: Deadline) -> Result<(), Error> {
        self.asked_at = Some(Instant::now());
        self.routing.refreshed += 1;
        let mut nodes: Vec<String> = self.clients.keys().cloned().collect();
        nodes.extend(self.seeds.iter().chain(self.slots.nodes()).cloned());
        let mut last = Error::Lost;
        for (at, node) in nodes.iter().enumerate() {
            if nodes.iter().take(at).any(|before| before == node) {
                continue;
            }
            let told = self.client(node, deadline).and_then(|client| {
                let text = client.text(&[b"CLUSTER", b"NODES"], LONGEST_MAP)?;
                Slots::parse(&text, node).ok_or_else(|| Error::Unexpected("no map of a cluster".into()))
            });
            match told {
                Ok(slots) => {
                    self.slots = slots;
                    // A node without slots is not needed, nor is a seed under another name.
                    self.retain(|slots, node, _| slots.nodes().iter().any(|one| one == node));
                    return Ok(());
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn drop_lost(&mut self) {
        self.retain(|_, _, client| !client.is_lost());
    }

    /// Drops clients, but keeps their counts.
    fn retain(&mut self, stays: impl Fn(&Slots, &str, &Client<T>) -> bool) {
        let Self { clients, slots, counts, .. } = self;
        clients.retain(|node, client| {
            let stays = stays(slots, node, client);
            if !stays {
                *counts = *counts + client.counts();
            }
            stays
        });
    }
}

impl<T: Transport, D> fmt::Debug for Cluster<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("seeds", &self.seeds)
            .field("nodes", &self.slots.nodes())
            .field("routing", &self.routing)
            .finish_non_exhaustive()
    }
}

/// Returns each answer with its index. One error for all stands at the first key only.
fn all<R>(
    indices: Vec<usize>,
    node: &str,
    sent: bool,
    answers: Result<Vec<Result<R, Error>>, Error>,
) -> Vec<Answer<R>> {
    let mut answers = answers.unwrap_or_else(|error| vec![Err(error)]).into_iter();
    let one = |index| {
        let result = answers.next().unwrap_or(Err(Error::Lost));
        Answer { index, node: node.into(), result, sent }
    };
    indices.into_iter().map(one).collect()
}

impl<R> Answer<R> {
    fn elsewhere(&self, repeats: bool) -> Option<Elsewhere> {
        match &self.result {
            // A node that refuses a command does not carry it out.
            Err(Error::Refused(text)) => Elsewhere::parse(text, &self.node),
            Err(Error::Io(_) | Error::Lost) if self.sent && !repeats => None,
            Err(Error::Io(_) | Error::Lost | Error::Unserved { .. }) => Some(Elsewhere::Later),
            _ => None,
        }
    }
}
