//! Options and limits.

use std::ffi::{CStr, c_char};
use std::mem::{MaybeUninit, offset_of, size_of};
use std::time::Duration;

use rdma_backend::RnrTimer;
use rdma_conn::Setting;
use rdma_proto::{Config, Keepalive, Role};

use crate::error::{Code, Failed, Failure, call, line};
use crate::sized::{self, Grows};

/// Settings of a connection. Fill it in with `vkrdma_client_options` or `vkrdma_server_options`,
/// then change fields. Calls that take it also take NULL for these defaults.
///
/// Later versions append fields; a program compiled with fewer gets the defaults of the others.
/// Durations are microseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The size of this structure that the program was compiled with.
    pub size: usize,
    /// Length of a receive window in bytes, 1 to 2^32 - 1: `rdma-rx-size` of Valkey. 1 MiB.
    pub window: u32,
    /// Receive windows, 1 or 2. With two, the second is announced as soon as the first is full. 2.
    pub windows: u32,
    /// Length of the send buffer in bytes, 1 to 2^30. 1 MiB.
    pub send_buffer: u32,
    /// The longest window that a peer may register, in bytes, at least 1. 16 MiB.
    pub window_limit: u32,
    /// Work requests that the send queue holds, 1 to 16384. 256.
    pub send_depth: u32,
    /// Receives that the peer is assumed to keep posted, 2 to 16384. 1024.
    pub peer_receives: u32,
    /// Receives kept posted, 1 to 16384. 1024, which peers count on.
    pub receives: u32,
    /// Bytes that a work request may carry within itself; the device may grant less. 128.
    pub inline_bytes: u32,
    /// Which completion vector signals completions, modulo the device's number of them. 0.
    pub completion_vector: u32,
    /// How long a peer waits before it retries without a posted receive: InfiniBand's code for
    /// `min_rnr_timer`, 0 to 31. 12, which is 0.64 ms.
    pub rnr_timer: u32,
    /// Whether a client asks for the server's features: 0 or 1. 0.
    pub negotiate: u32,
    /// Whether to register the send buffer when the connection is established, not by its first
    /// write: 0 or 1. 0.
    pub eager_send_buffer: u32,
    /// Send a keepalive this often; 0 for never. Clients 0, servers 3 s.
    pub keepalive_every: u64,
    /// Send a keepalive when the peer has sent nothing for this long; 0 for never. Clients 10 s,
    /// servers 0.
    pub keepalive_probe: u64,
    /// End the connection when the peer has sent nothing for this long; 0 for never. 0.
    pub keepalive_limit: u64,
    /// End the connection when the peer keeps data waiting for this long; 0 for never. 0.
    pub stall_limit: u64,
    /// How long an accepted connection may take to be established. 5 s.
    pub handshake_timeout: u64,
    /// How long an idle connection keeps memory that only a busy one needs; at least 1000. 5 s.
    pub keep_memory: u64,
    /// How long the endpoint busy-polls before it waits for a wake-up; its time-out is then 0. The
    /// longest of its connections applies. 0.
    pub spin: u64,
    /// Options that a network or a card may want, which `vkrdma_options_set` writes:
    /// `ack_timeout=16 huge_pages=yes`, closed by a zero. Empty.
    pub settings: [c_char; VKRDMA_SETTINGS_TEXT],
}

/// Bytes of `vkrdma_options.settings`, the closing zero included.
pub const VKRDMA_SETTINGS_TEXT: usize = 256;

// SAFETY: all fields are numbers, and their sizes sum up to the structure's: no padding.
unsafe impl Grows for Options {
    const FIRST: usize = 8 + 12 * 4 + 7 * 8;
}

const _: () = assert!(offset_of!(Options, settings) == Options::FIRST);
const _: () = assert!(size_of::<Options>() == Options::FIRST + VKRDMA_SETTINGS_TEXT);

/// Limits for all connections of an endpoint and of those that share them by
/// `vkrdma_endpoint_new_sharing`.
///
/// Set `size` to `sizeof(vkrdma_limits)`, and all other fields. NULL stands for 10,000 connections,
/// 2 GiB of registered memory and the default backlog.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The size of this structure that the program was compiled with.
    pub size: usize,
    /// Simultaneous connections, including those being established or closed; UINT64_MAX for no
    /// limit. Others are rejected.
    pub connections: u64,
    /// Bytes of registered memory; UINT64_MAX for no limit. A connection beyond is rejected. An
    /// established one continues, with a send buffer of a page if there is no more memory.
    pub registered_bytes: u64,
    /// Connections that were accepted and that the program does not have yet: handshakes, those
    /// whose VKRDMA_EVENT_OPENED was not taken, and those closed before the next `vkrdma_progress`.
    /// None of them has a receive window. Further requests wait, and then a handshake is ended that
    /// is not complete after 0.1 s. 0 for 256, UINT64_MAX for no limit.
    pub backlog: u64,
}

// SAFETY: as above.
unsafe impl Grows for Limits {
    const FIRST: usize = 8 + 2 * 8;
}

const _: () = assert!(size_of::<Limits>() == Limits::FIRST + 8);

const fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

const fn interval(interval: Option<Duration>) -> u64 {
    match interval {
        Some(duration) => micros(duration),
        None => 0,
    }
}

fn maybe(micros: u64) -> Option<Duration> {
    (micros > 0).then(|| Duration::from_micros(micros))
}

// A value that does not fit is out of bounds, and so is this one.
fn narrow(value: u32) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

impl Options {
    fn of(options: &rdma_conn::Options) -> Self {
        let Config { window, windows, send_buffer, send_depth, peer_receives, window_limit, .. } =
            options.protocol;
        let Keepalive { every, probe, limit, .. } = options.protocol.keepalive.unwrap_or(Keepalive::NONE);
        Self {
            size: size_of::<Self>(),
            window,
            windows: windows.into(),
            send_buffer,
            window_limit,
            send_depth: send_depth.into(),
            peer_receives: peer_receives.into(),
            receives: options.receives.into(),
            inline_bytes: options.inline,
            completion_vector: options.completion_vector,
            rnr_timer: options.rnr_timer.code().into(),
            negotiate: options.protocol.negotiate.into(),
            eager_send_buffer: options.eager_send_buffer.into(),
            keepalive_every: interval(every),
            keepalive_probe: interval(probe),
            keepalive_limit: interval(limit),
            stall_limit: interval(options.protocol.stall_limit),
            handshake_timeout: micros(options.handshake_timeout),
            keep_memory: micros(options.keep_memory),
            spin: micros(options.spin),
            settings: [0; VKRDMA_SETTINGS_TEXT],
        }
    }

    fn to_options(self, otherwise: rdma_conn::Options) -> Result<rdma_conn::Options, Failure> {
        let rnr_timer = u8::try_from(self.rnr_timer).ok().and_then(RnrTimer::from_code);
        let rnr_timer = rnr_timer.ok_or_else(|| out_of_bounds("rnr_timer must be 0 to 31"))?;
        if self.negotiate > 1 || self.eager_send_buffer > 1 {
            return Err(out_of_bounds("negotiate and eager_send_buffer must be 0 or 1"));
        }
        let keepalive = Keepalive::NONE
            .every(maybe(self.keepalive_every))
            .probe(maybe(self.keepalive_probe))
            .limit(maybe(self.keepalive_limit));
        let protocol = otherwise
            .protocol
            .window(self.window)
            .windows(u8::try_from(self.windows).unwrap_or(u8::MAX))
            .send_buffer(self.send_buffer)
            .send_depth(narrow(self.send_depth))
            .peer_receives(narrow(self.peer_receives))
            .window_limit(self.window_limit)
            .negotiate(self.negotiate == 1)
            .keepalive(Some(keepalive))
            .stall_limit(maybe(self.stall_limit));
        let options = otherwise
            .protocol(protocol)
            .receives(narrow(self.receives))
            .inline(self.inline_bytes)
            .rnr_timer(rnr_timer)
            .handshake_timeout(Duration::from_micros(self.handshake_timeout))
            .keep_memory(Duration::from_micros(self.keep_memory))
            .eager_send_buffer(self.eager_send_buffer == 1)
            .spin(Duration::from_micros(self.spin))
            .completion_vector(self.completion_vector);
        options.check()?;
        let settings = self.settings();
        settings.split(' ').filter(|text| !text.is_empty()).try_fold(options, |mut options, text| {
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            let setting = Setting::named(name).ok_or_else(|| unknown(name))?;
            setting.set(&mut options, value)?;
            Ok(options)
        })
    }

    fn settings(&self) -> String {
        let bytes = self.settings.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    }

    fn set_setting(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        let setting = Setting::named(name).ok_or_else(|| unknown(name))?;
        setting.set(&mut rdma_conn::Options::default(), value)?;
        let settings = self.settings();
        let others = settings.split(' ').filter(|text| !text.starts_with(&format!("{name}=")));
        let text = others.chain([&*format!("{name}={value}")]).collect::<Vec<_>>().join(" ");
        if text.len() >= VKRDMA_SETTINGS_TEXT {
            return Err(out_of_bounds("the options have no room for another setting"));
        }
        self.settings = line(&text);
        Ok(())
    }
}

/// Sets a numeric field by its name. Returns `None` if there is no such field or it takes no such
/// number.
macro_rules! fields {
    ($($field:ident)+) => {
        const FIELDS: &str = concat!($(stringify!($field), " "),+);

        fn set_field(options: &mut Options, name: &str, value: &str) -> Option<Result<(), Failure>> {
            match name {
                $(stringify!($field) => Some(value.parse().map(|number| options.$field = number).map_err(
                    |_| out_of_bounds_of(concat!(stringify!($field), " is a number"), value),
                )),)+
                _ => None,
            }
        }
    };
}

fields! {
    window windows send_buffer window_limit send_depth peer_receives receives inline_bytes completion_vector
    rnr_timer negotiate eager_send_buffer keepalive_every keepalive_probe keepalive_limit stall_limit
    handshake_timeout keep_memory spin
}

fn unknown(name: &str) -> Failure {
    let text = format!("there is no option {name}; there are {FIELDS}and {}", Setting::list());
    Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into())
}

fn out_of_bounds_of(rule: &str, value: &str) -> Failure {
    Failure::Here(Code::VKRDMA_INVALID_OPTIONS, format!("{rule}, which '{value}' is not").into())
}

pub(crate) fn defaults(role: Role) -> rdma_conn::Options {
    let options = rdma_conn::Options::default();
    options.protocol(options.protocol.keepalive(Some(role.keepalive())))
}

fn out_of_bounds(text: &'static str) -> Failure {
    Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into())
}

/// Null stands for `otherwise`.
///
/// # Safety
/// `options` is null, or points to options whose `size` is right.
pub(crate) unsafe fn options(
    options: *const Options,
    otherwise: rdma_conn::Options,
) -> Result<rdma_conn::Options, Failure> {
    if options.is_null() {
        return Ok(otherwise);
    }
    // SAFETY: the caller's promise.
    unsafe { sized::read(options, Options::of(&otherwise)) }?.to_options(otherwise)
}

/// Null stands for the defaults.
///
/// # Safety
/// `limits` is null, or points to limits whose `size` is right.
pub(crate) unsafe fn limits(limits: *const Limits) -> Result<rdma_conn::Limits, Failure> {
    let otherwise = rdma_conn::Limits::default();
    if limits.is_null() {
        return Ok(otherwise);
    }
    let default = Limits {
        size: size_of::<Limits>(),
        connections: otherwise.connections as u64,
        registered_bytes: otherwise.registered_bytes,
        backlog: 0,
    };
    // SAFETY: the caller's promise.
    let said = unsafe { sized::read(limits, default) }?;
    let most = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let limits = otherwise.connections(most(said.connections)).registered_bytes(said.registered_bytes);
    // A program that does not know the field leaves it 0.
    Ok(if said.backlog == 0 { limits } else { limits.backlog(most(said.backlog)) })
}

/// Fills in the defaults of clients. `size` is `sizeof(vkrdma_options)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_client_options(options: *mut Options, size: usize) -> Code {
    // SAFETY: the caller's promise.
    unsafe { fill(options, size, &defaults(Role::Client)) }
}

/// Fills in the defaults of servers. `size` is `sizeof(vkrdma_options)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_server_options(options: *mut Options, size: usize) -> Code {
    // SAFETY: the caller's promise.
    unsafe { fill(options, size, &defaults(Role::Server)) }
}

/// Sets an option by its name: a field of `vkrdma_options`, or one that a network or a card may
/// want, such as `ack_timeout`. The text of the error for an unknown name lists all.
///
/// The options must be filled in. VKRDMA_INVALID_OPTIONS: there is no such option, or it does not
/// take this value; nothing is changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_options_set(
    options: *mut Options,
    name: *const c_char,
    value: *const c_char,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        if options.is_null() || name.is_null() || value.is_null() {
            return Err(Failure::argument("the options, the name or the value is null"));
        }
        let otherwise = defaults(Role::Client);
        // SAFETY: it is not null, and the caller's promise.
        let mut changed = unsafe { sized::read(options, Options::of(&otherwise)) }?;
        // SAFETY: as above.
        let (name, value) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(value)) };
        let name = name.to_string_lossy().to_ascii_lowercase();
        let value = value.to_string_lossy();
        if let Some(set) = set_field(&mut changed, &name, &value) {
            set?;
        } else if changed.size < size_of::<Options>() && Setting::named(&name).is_some() {
            // A structure without the field that keeps settings: only its own fields can be named.
            let text = format!(
                "the option {name} needs a program that is compiled with this version's vkrdma.h; \
                 the options here are {}",
                FIELDS.trim_end()
            );
            return Err(Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into()));
        } else {
            changed.set_setting(&name, &value)?;
        }
        changed.to_options(otherwise)?;
        // SAFETY: as above.
        unsafe { sized::write(options, changed.size, &changed) }
    })
}

unsafe fn fill(options: *mut Options, size: usize, with: &rdma_conn::Options) -> Code {
    call(None, || {
        let with = Options { size, ..Options::of(with) };
        // SAFETY: the caller's promise.
        unsafe { sized::write(options, size, &with) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_by_name_reach_the_connection() {
        let mut options = Options::of(&defaults(Role::Server));
        for text in ["ack_timeout=14", "huge_pages=yes", "ack_timeout=16"] {
            let (name, value) = text.split_once('=').expect("a value");
            options.set_setting(name, value).expect("is well formed");
        }
        assert!(set_field(&mut options, "spin", "50").expect("a field").is_ok());
        assert!(set_field(&mut options, "windows", "-1").expect("a field").is_err());
        assert!(options.set_setting("ack_timeout", "16 huge_pages=no").is_err());
        let made = options.to_options(defaults(Role::Server)).expect("within bounds");
        let expected = defaults(Role::Server).ack_timeout(Some(16)).huge_pages(true);
        assert_eq!(made, expected.spin(Duration::from_micros(50)));
    }
}
