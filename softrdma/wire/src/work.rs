//! Work requests and completions.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the structure's own fields")]
pub struct Sge {
    pub address: u64,
    pub len: u32,
    pub lkey: u32,
}

/// A send work request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of struct ibv_send_wr")]
pub struct Send<'a> {
    pub id: u64,
    pub op: Op,
    pub signaled: bool,
    pub solicited: bool,
    #[serde(borrow)]
    pub local: Local<'a>,
}

/// The bytes of a send work request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Local<'a> {
    /// In registered memory, in at most [`MAX_ELEMENTS`](crate::MAX_ELEMENTS) places.
    Memory(Vec<Sge>),
    /// In the message itself.
    #[serde(borrow)]
    Inline(Cow<'a, [u8]>),
}

/// The operation of a send work request. Immediates are numbers, not bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the operations' own names")]
pub enum Op {
    Send,
    SendImmediate(u32),
    Write {
        address: u64,
        rkey: u32,
    },
    WriteImmediate {
        address: u64,
        rkey: u32,
        immediate: u32,
    },
    Read {
        address: u64,
        rkey: u32,
    },
    FetchAdd {
        address: u64,
        rkey: u32,
        add: u64,
    },
    CompareSwap {
        address: u64,
        rkey: u32,
        compare: u64,
        swap: u64,
    },
    /// SEND of a queue pair for datagrams.
    Datagram {
        to: Destination,
        immediate: Option<u32>,
    },
}

/// Where a datagram goes: the addresses of its address handle, and `wr.ud`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of rdma_softsim::Destination")]
pub struct Destination {
    pub local: IpAddr,
    pub remote: IpAddr,
    pub number: u32,
    pub key: u32,
}

/// A receive work request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of struct ibv_recv_wr")]
pub struct Receive {
    pub id: u64,
    pub local: Vec<Sge>,
}

/// A work completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields of struct ibv_wc, as numbers")]
pub struct Completion {
    pub id: u64,
    pub pair: u32,
    /// 0 on success; otherwise `opcode`, `len` and `immediate` are undefined.
    pub status: u32,
    pub vendor: u32,
    pub opcode: u32,
    pub len: u32,
    pub immediate: Option<u32>,
    pub source: Option<Source>,
}

/// Where a received datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// `src_qp`.
    pub number: u32,
    /// Whether its GRH is the header of IPv4.
    pub ip4: bool,
}
