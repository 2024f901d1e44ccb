//! Numbers in words, and conversions of rates.

use core::ffi::{CStr, c_char, c_int, c_uint};

/// Returns word number `index` of `words`, or `otherwise`.
fn word(words: &[&'static CStr], index: c_int, otherwise: &'static CStr) -> *const c_char {
    let found = usize::try_from(index).ok().and_then(|index| words.get(index));
    found.copied().unwrap_or(otherwise).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn rdma_event_str(event: c_int) -> *const c_char {
    let words = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    ];
    word(&words, event, c"UNKNOWN EVENT")
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    let words = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory bind operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
    ];
    word(&words, status, c"unknown")
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    let words = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID change",
        c"WQ fatal",
    ];
    word(&words, event, c"unknown")
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    let words = [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"deferred active"];
    word(&words, state, c"invalid state")
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_node_type_str(kind: c_int) -> *const c_char {
    let words = [c"unknown", c"InfiniBand channel adapter", c"InfiniBand switch", c"InfiniBand router"];
    word(&words, kind, c"unknown")
}

/// `enum ibv_rate`, in multiples of 2.5 Gb/s and in Mb/s (`ibv_rate_to_mult(3)`,
/// `ibv_rate_to_mbps(3)`).
const RATES: [(c_uint, c_int, c_int); 9] = [
    (2, 1, 2500),
    (5, 2, 5000),
    (3, 4, 10000),
    (6, 8, 20000),
    (4, 12, 30000),
    (7, 16, 40000),
    (8, 24, 60000),
    (9, 32, 80000),
    (10, 48, 120_000),
];

#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(rate: c_uint) -> c_int {
    RATES.iter().find(|(code, ..)| *code == rate).map_or(-1, |(_, multiple, _)| *multiple)
}

#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(multiple: c_int) -> c_uint {
    RATES.iter().find(|(_, known, _)| *known == multiple).map_or(0, |(code, ..)| *code)
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(rate: c_uint) -> c_int {
    RATES.iter().find(|(code, ..)| *code == rate).map_or(-1, |(_, _, mbps)| *mbps)
}

#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_uint {
    RATES.iter().find(|(_, _, known)| *known == mbps).map_or(0, |(code, ..)| *code)
}
