//! `softrdma doctor`: finds out whether programs can run here.

use rustix::io::Errno;
use rustix::process::{PTracer, Pid, set_ptracer};
use softrdma_wire::{Reply, Request, Socket, VERSION};

use crate::runtime::{Error, Place, exchange, has_rdma_core};

/// Where Yama states whether it restricts access between processes, and how far.
const SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// A number in this process, which the fabric tries to reach.
static SHOWN: u64 = 0x736f_6674_7264_6d61;

/// Starts a fabric as a program would, and reports what is there and what is missing, in lines.
pub fn report() -> Result<String, Error> {
    let place = Place::of("doctor")?;
    let libraries = place.libraries()?;
    let rdma_core = match has_rdma_core() {
        true => "installed; its libibverbs is loaded beside ours, for providers' libraries",
        false => "not installed; ours stands in for it",
    };
    let reaches = is_reached(&mut place.enter()?)?;
    let scope = std::fs::read_to_string(SCOPE).ok();
    Ok(format!(
        "libraries: {}\nrdma-core: {rdma_core}\nfabric: starts and answers\nreaching into programs: {}",
        libraries.search().display(),
        reaching(reaches, scope.as_deref().map(str::trim))
    ))
}

/// Whether the fabric can access this process's memory.
fn is_reached(fabric: &mut Socket) -> Result<bool, Error> {
    let devices = vec![vec![[192, 0, 2, 1].into()]];
    let hello = Request::Hello { version: VERSION, program: "doctor".into(), devices, above: 0 };
    let Reply::Welcome { fabric: process, .. } = exchange(fabric, &hello, None)? else {
        return Err(Error::Refused);
    };
    // As programs do (`PR_SET_PTRACER(2const)`). Without Yama the call fails, and is not needed.
    let tracer = i32::try_from(process).ok().and_then(Pid::from_raw);
    let _not_needed = set_ptracer(tracer.map_or(PTracer::None, PTracer::ProcessID));
    let at = (&raw const SHOWN).expose_provenance() as u64;
    match exchange(fabric, &Request::ShowMemory { at, number: SHOWN }, None)? {
        Reply::Done => Ok(true),
        Reply::Refused(errno) if errno == Errno::PERM.raw_os_error() => Ok(false),
        _ => Err(Error::Refused),
    }
}

/// States how the fabric reaches programs' memory, and why.
///
/// `scope` is Yama's `ptrace_scope`, if there is one (`Documentation/admin-guide/LSM/Yama.rst`).
fn reaching(reaches: bool, scope: Option<&str>) -> String {
    const SLOWLY: &str = "programs copy their memory themselves, which is slower";
    match (reaches, scope) {
        (true, Some("1")) => "restricted by Yama (ptrace_scope 1); programs allow it themselves".into(),
        (true, _) => "allowed".into(),
        (false, Some(scope @ ("2" | "3"))) => format!("forbidden by Yama (ptrace_scope {scope}); {SLOWLY}"),
        (false, _) => format!("forbidden by a seccomp profile, or without /proc; {SLOWLY}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_names_what_forbids_to_reach_into_programs() {
        let slowly = "; programs copy their memory themselves, which is slower";
        for (reaches, scope, words) in [
            (true, None, "allowed".into()),
            (true, Some("0"), "allowed".into()),
            (true, Some("1"), "restricted by Yama (ptrace_scope 1); programs allow it themselves".into()),
            // With CAP_SYS_PTRACE.
            (true, Some("2"), "allowed".into()),
            (false, Some("2"), format!("forbidden by Yama (ptrace_scope 2){slowly}")),
            (false, Some("3"), format!("forbidden by Yama (ptrace_scope 3){slowly}")),
            (false, Some("0"), format!("forbidden by a seccomp profile, or without /proc{slowly}")),
            (false, None, format!("forbidden by a seccomp profile, or without /proc{slowly}")),
        ] {
            assert_eq!(reaching(reaches, scope), words);
        }
    }
}
