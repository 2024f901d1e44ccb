//! The connection of a client, or its connections to the nodes of a cluster.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_kv::{Cluster, ClusterBuffer, Counts, Error, MemoryUse, Part, Registrations, Routing};

use crate::address::Address;
use crate::errors::Failure;
use crate::memory::Pieces;
use crate::server::{Refusal, Server, Settings, Way, named};
use crate::wire::{Connection, lock};

type Client = rdma_kv::Client<Connection>;

type Dial = Box<dyn FnMut(&str) -> Result<Client, Error> + Send>;

/// The server or the cluster that a client and its siblings share, with their registered memory.
#[derive(Clone)]
pub(crate) enum Target {
    One(Arc<dyn Server>),
    Many(Arc<Nodes>),
}

impl Target {
    pub(crate) fn named(address: &Arc<Address>, settings: Settings) -> Result<Self, Refusal> {
        if address.cluster {
            return Ok(Self::Many(Arc::new(Nodes {
                address: Arc::clone(address),
                settings,
                servers: Mutex::default(),
                memories: Mutex::default(),
            })));
        }
        let host = address.hosts.first().map_or("", String::as_str);
        Ok(Self::One(named(address, host, settings, None)?))
    }

    pub(crate) fn connect(&self, address: &Address, settings: Settings) -> Result<Link, Failure> {
        match self {
            Self::One(server) => {
                Ok(Link::One(log_in(&**server, address, settings).map_err(Failure::Connect)?))
            }
            Self::Many(nodes) => {
                let dial: Dial = Box::new({
                    let nodes = Arc::clone(nodes);
                    move |node| nodes.dial(node)
                });
                let mut cluster =
                    Cluster::new(address.hosts.iter().map(|host| crate::server::with_port(host)), dial);
                cluster.set_timeout(settings.timeout);
                cluster.set_repeats(settings.repeats);
                cluster.connect().map_err(|error| Failure::Connect(error.into()))?;
                Ok(Link::Many(cluster, Arc::clone(nodes)))
            }
        }
    }

    pub(crate) fn unregister(&self, address: usize) -> bool {
        match self {
            Self::One(server) => server.unregister(address),
            Self::Many(nodes) => nodes.unregister(address),
        }
    }

    pub(crate) fn registrations(&self) -> usize {
        match self {
            Self::One(server) => server.registrations(),
            Self::Many(nodes) => lock(&nodes.memories).len(),
        }
    }

    pub(crate) fn way(&self) -> Option<Way> {
        match self {
            Self::One(server) => Some(server.way()),
            Self::Many(nodes) => lock(&nodes.servers).values().next().map(|server| server.way()),
        }
    }
}

fn log_in(server: &dyn Server, address: &Address, settings: Settings) -> Result<Client, Refusal> {
    let mut client = Client::new(Connection(server.connect()?));
    client.set_timeout(settings.timeout);
    client.log_in(&address.login)?;
    Ok(client)
}

/// The nodes of a cluster. Each has its own protection domain, so memory is registered with each.
pub(crate) struct Nodes {
    address: Arc<Address>,
    settings: Settings,
    servers: Mutex<HashMap<String, Arc<dyn Server>>>,
    memories: Mutex<Registrations<rdma_kv::Memory>>,
}

impl Nodes {
    fn dial(&self, node: &str) -> Result<Client, Error> {
        let told = |refusal: Refusal| Error::Io(std::io::Error::other(refusal));
        let server = self.server(node).map_err(told)?;
        let client = log_in(&*server, &self.address, self.settings).map_err(|refusal| {
            // `rdma-kv` does not try again after its own errors, such as a wrong password.
            refusal.downcast::<Error>().map_or_else(told, |error| *error)
        })?;
        let memories: Vec<_> = lock(&self.memories).buffers().cloned().collect();
        for memory in memories {
            client.stream().0.register(memory)?;
        }
        Ok(client)
    }

    /// Returns the server at a node. All nodes use the transport of the first one.
    fn server(&self, node: &str) -> Result<Arc<dyn Server>, Refusal> {
        let way = {
            let servers = lock(&self.servers);
            if let Some(server) = servers.get(node) {
                return Ok(Arc::clone(server));
            }
            servers.values().next().map(|server| server.way())
        };
        let server = named(&self.address, node, self.settings, way)?;
        Ok(Arc::clone(lock(&self.servers).entry(node.into()).or_insert(server)))
    }

    fn unregister(&self, address: usize) -> bool {
        let memory = lock(&self.memories).remove(address);
        let servers: Vec<_> = lock(&self.servers).values().cloned().collect();
        for server in servers {
            server.unregister(address);
        }
        memory.is_some()
    }
}

pub(crate) enum Link {
    One(Client),
    Many(Cluster<Connection, Dial>, Arc<Nodes>),
}

impl Link {
    /// Returns whether the next command replaces a lost connection.
    pub(crate) const fn heals(&self) -> bool {
        matches!(self, Self::Many(..))
    }

    pub(crate) fn counts(&self) -> Counts {
        match self {
            Self::One(client) => client.counts(),
            Self::Many(cluster, _) => cluster.counts(),
        }
    }

    pub(crate) const fn routing(&self) -> Option<Routing> {
        match self {
            Self::One(_) => None,
            Self::Many(cluster, _) => Some(cluster.routing()),
        }
    }

    /// Registers memory with the server, or with every node. False if a part is registered.
    pub(crate) fn register(&mut self, memory: rdma_kv::Memory) -> Result<bool, Failure> {
        match self {
            Self::One(client) => client.stream().0.register(memory).map_err(Failure::Register),
            Self::Many(cluster, nodes) => {
                if lock(&nodes.memories).add(&memory, memory.clone()).is_err() {
                    return Ok(false);
                }
                let address = memory.address();
                let registered = cluster.connect().map_err(Failure::from).and_then(|()| {
                    cluster.clients().try_for_each(|(_node, client)| {
                        client.stream().0.register(memory.clone()).map(|_new| ()).map_err(Failure::Register)
                    })
                });
                if registered.is_err() {
                    nodes.unregister(address);
                }
                registered.map(|()| true)
            }
        }
    }

    pub(crate) fn mget_into(
        &mut self,
        parts: &[Part<'_>],
        pieces: &mut Pieces,
    ) -> Result<Vec<Result<Option<usize>, Error>>, Error> {
        match self {
            Self::One(client) => client.mget_into(parts, pieces),
            Self::Many(cluster, _) => cluster.mget_into(parts, &mut ClusterBuffer::of(pieces.clone())),
        }
    }

    pub(crate) fn get_into(&mut self, key: &[u8], pieces: &mut Pieces) -> Result<Option<usize>, Error> {
        let range = 0..rdma_kv::Buffer::len(pieces);
        self.mget_into(&[Part { key, range }], pieces)?.pop().unwrap_or(Ok(None))
    }

    pub(crate) fn mset_from(
        &mut self,
        parts: &[Part<'_>],
        pieces: &Pieces,
        lives: Option<Duration>,
    ) -> Result<Vec<Result<(), Error>>, Error> {
        match self {
            Self::One(client) => {
                client.set_time_to_live(lives);
                client.mset_from(parts, pieces)
            }
            Self::Many(cluster, _) => {
                cluster.set_time_to_live(lives);
                cluster.mset_from(parts, &mut ClusterBuffer::of(pieces.clone()))
            }
        }
    }

    pub(crate) fn set_from(
        &mut self,
        key: &[u8],
        pieces: &Pieces,
        lives: Option<Duration>,
    ) -> Result<(), Error> {
        let range = 0..rdma_kv::Buffer::len(pieces);
        self.mset_from(&[Part { key, range }], pieces, lives)?.pop().unwrap_or(Ok(()))
    }

    pub(crate) fn present(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, Error> {
        let there = match self {
            Self::One(client) => client.present(keys),
            Self::Many(cluster, _) => cluster.present(keys),
        };
        there?.into_iter().collect()
    }

    pub(crate) fn exists(&mut self, keys: &[&[u8]]) -> Result<u64, Error> {
        match self {
            Self::One(client) => client.exists(keys),
            Self::Many(cluster, _) => cluster.exists(keys),
        }
    }

    pub(crate) fn del(&mut self, keys: &[&[u8]]) -> Result<u64, Error> {
        match self {
            Self::One(client) => client.del(keys),
            Self::Many(cluster, _) => cluster.del(keys),
        }
    }

    /// Returns how much memory each node uses. `alone` is the name of a single server.
    pub(crate) fn memory(&mut self, alone: &str) -> Result<Vec<(String, MemoryUse)>, Error> {
        match self {
            Self::One(client) => Ok(vec![(alone.into(), client.memory()?)]),
            Self::Many(cluster, _) => cluster.memory(),
        }
    }

    pub(crate) fn strlen(&mut self, key: &[u8]) -> Result<u64, Error> {
        match self {
            Self::One(client) => client.strlen(key),
            Self::Many(cluster, _) => cluster.strlen(key),
        }
    }
}
