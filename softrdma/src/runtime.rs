//! Where a fabric lives: a directory of its user, with a socket, a lock, a log and the libraries'
//! names.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use softrdma_wire::{ADDRESSES, Listener, Reply, Request, SOCKET, Socket, VIEW};

use crate::detached;
use crate::fabric::Fabric;
use crate::view;

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The fabric's name would be no file name.
    #[error("{0:?} is no name for a fabric: letters, digits, `-` and `_`, at most 32 of them")]
    Name(String),
    /// No program runs on this fabric.
    #[error("no fabric `{0}`: `softrdma run --fabric {0} -- COMMAND` starts one")]
    Nothing(String),
    /// The directory is not this user's alone.
    #[error("{} is not this user's alone; remove it, or set XDG_RUNTIME_DIR", .0.display())]
    Foreign(PathBuf),
    /// A call on a file or a process failed.
    #[error("{what}: {error}")]
    System {
        /// The file or the action.
        what: String,
        /// The reason.
        #[source]
        error: io::Error,
    },
    /// The fabric's socket failed.
    #[error("the fabric at {}: {error}; its log is beside it", .path.display())]
    Fabric {
        /// The socket's path.
        path: PathBuf,
        /// The reason.
        #[source]
        error: softrdma_wire::Error,
    },
    /// The fabric did not answer.
    #[error("the fabric: {error}")]
    Told {
        /// The reason.
        #[source]
        error: softrdma_wire::Error,
    },
    /// A bound of the fabric was in the way.
    #[error("the fabric refuses this: {0}")]
    Exceeded(softrdma_wire::Exceeded),
    /// The fabric refused a request that every program makes.
    #[error("the fabric refuses a program: it is of another version; end its programs")]
    Refused,
    /// A fault is invalid.
    #[error(transparent)]
    Written(#[from] crate::faults::Error),
    /// The fabric refused a fault.
    #[error(
        "the fabric refuses this: what strikes by itself has no chance, kill comes at once, and at most 1024 faults wait for machines"
    )]
    Fault,
    /// The fabric refused to record to a file.
    #[error("{}: {error}", .path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The reason: it is no regular file, or the fabric records to another one.
        #[source]
        error: io::Error,
    },
    /// The library was not built, or not installed, together with this program.
    #[error("{} is not there: it is built and installed together with this program", .0.display())]
    Library(PathBuf),
    /// rdma-core's library for rsockets is not installed.
    #[error("rsocket/librspreload.so is not there: it comes with rdma-core (Debian: librdmacm1)")]
    Rsockets,
}

pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |error| Error::System { what, error }
}

/// Sends the fabric a request, with a descriptor if there is one, and waits for its answer.
///
/// # Errors
/// [`Error::Told`] if either fails, [`Error::Exceeded`] if the fabric has no room.
pub fn exchange(
    fabric: &mut Socket,
    request: &Request<'_>,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<Reply, Error> {
    let failed = |error| Error::Told { error };
    fabric.send(request, descriptor).map_err(failed)?;
    match fabric.receive().map_err(failed)?.0 {
        Reply::Exceeded(exceeded) => Err(Error::Exceeded(exceeded)),
        reply => Ok(reply),
    }
}

/// Returns the name of the environment variable with a program's folder of device files.
#[must_use]
pub fn view() -> &'static OsStr {
    OsStr::from_bytes(VIEW.to_bytes())
}

/// The directory of one fabric.
#[derive(Clone, Debug)]
pub struct Place {
    directory: PathBuf,
}

impl Place {
    /// Returns the place of this user's fabric with this name, which need not exist.
    pub fn at(name: &str) -> Result<Self, Error> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > 32 || !name.chars().all(allowed) {
            return Err(Error::Name(name.into()));
        }
        let user = rustix::process::geteuid().as_raw();
        let base = match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(base) if Path::new(&base).is_absolute() => PathBuf::from(base).join("softrdma"),
            _ => std::env::temp_dir().join(format!("softrdma-{user}")),
        };
        let directory = base.join(name);
        // Another user may have made the directory, to intercept connections.
        for directory in [&base, &directory] {
            match std::fs::symlink_metadata(directory) {
                Ok(found) if found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(system(directory.display().to_string())(error)),
                Ok(_) => return Err(Error::Foreign(directory.clone())),
            }
        }
        Ok(Self { directory })
    }

    /// Returns the place of this user's fabric with this name, and makes its directory if there is
    /// none.
    pub fn of(name: &str) -> Result<Self, Error> {
        let Self { directory } = Self::at(name)?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(system(directory.display().to_string()))?;
        // Another user may have made it between the check and the creation.
        Self::at(name)
    }

    /// Returns the path of the socket to which programs connect.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of the fabric's log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// Locks the fabric: no other process starts or ends it until the result is dropped.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        let path = self.directory.join("lock");
        let options = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = options.map_err(system(path.display().to_string()))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|errno| system("lock")(errno.into()))?;
        Ok(file)
    }

    /// Connects to the fabric, if it is running.
    pub fn connect(&self) -> Result<Option<Socket>, Error> {
        let path = self.socket();
        match Socket::connect(&path) {
            Ok(socket) => Ok(Some(socket)),
            Err(softrdma_wire::Error::System(rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED)) => {
                Ok(None)
            }
            Err(error) => Err(Error::Fabric { path, error }),
        }
    }

    /// Connects to the fabric, which is started if it is not running. It lives for as long as a
    /// program is connected.
    pub fn enter(&self) -> Result<Socket, Error> {
        let _lock = self.lock()?;
        if let Some(socket) = self.connect()? {
            return Ok(socket);
        }
        let program = std::env::current_exe().map_err(system("this program"))?;
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(self.log())
            .map_err(system(self.log().display().to_string()))?;
        let failed = system("starting the fabric");
        let started = || {
            let (mut output, written) = std::io::pipe()?;
            let streams = [File::open("/dev/null")?.into(), written.into(), log.into()];
            let arguments = [OsStr::new("fabric"), self.directory.as_os_str()];
            // It is no program on a fabric, also if its starter is one.
            let without = [OsStr::new("LD_PRELOAD"), OsStr::new(SOCKET), OsStr::new(ADDRESSES), view()];
            detached::start(program.as_os_str(), &arguments, &without, streams)?;
            // The fabric closes its output when it listens, or ends.
            output.read_to_end(&mut Vec::new())
        };
        started().map_err(failed)?;
        let path = self.socket();
        Socket::connect(&path).map_err(|error| Error::Fabric { path, error })
    }

    /// Runs the fabric of this place until the last program has left. Calls `ready` when programs
    /// can connect.
    pub fn host(directory: &Path, ready: impl FnOnce()) -> Result<(), Error> {
        let place = Self { directory: directory.to_path_buf() };
        let path = place.socket();
        // The process that starts a fabric holds the lock, so this socket is a leftover, as are the
        // folders of a fabric that was killed.
        let _old = std::fs::remove_file(&path);
        view::remove_all(directory);
        let failed = |error| Error::Fabric { path: path.clone(), error };
        let listener = Listener::bind(&path).map_err(failed)?;
        // The channels of programs are also descriptors of this process.
        let limit = getrlimit(Resource::Nofile);
        _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let fabric = Fabric::new().map_err(|errno| system("the fabric")(errno.into()))?;
        ready();
        loop {
            fabric.serve(&listener).map_err(failed)?;
            let _lock = place.lock()?;
            // A program may have connected before the lock was taken.
            if deserted(&fabric, &listener) {
                fabric.end_recording();
                view::remove_all(directory);
                let _gone = std::fs::remove_file(&path);
                return Ok(());
            }
        }
    }

    /// Makes a directory in which the libraries have the names that programs look for.
    pub fn libraries(&self) -> Result<Libraries, Error> {
        let program = std::env::current_exe().map_err(system("this program"))?;
        let named = |name: &str| {
            let library = program.with_file_name(name);
            if library.is_file() { Ok(library) } else { Err(Error::Library(library)) }
        };
        let (library, verbs) = (named("librdmacm-softrdma")?, named("libibverbs-softrdma")?);
        let directory = self.directory.join("lib");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(system(directory.display().to_string()))?;
        let _lock = self.lock()?;
        for (name, library) in
            [("librdmacm.so.1", &library), ("libibverbs.so.1", &library), ("libibverbs-softrdma.so", &verbs)]
        {
            let link = directory.join(name);
            if std::fs::read_link(&link).is_ok_and(|there| there == *library) {
                continue;
            }
            // Replaced in one step, as a program may be loading the old one.
            let new = link.with_extension("new");
            let _old = std::fs::remove_file(&new);
            symlink(library, &new)
                .and_then(|()| std::fs::rename(&new, &link))
                .map_err(system(link.display().to_string()))?;
        }
        Ok(Libraries { directory })
    }
}

fn deserted(fabric: &Arc<Fabric>, listener: &Listener) -> bool {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let coming = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0);
    fabric.is_deserted() && !coming
}

/// Both libraries, under the names that programs look for.
#[derive(Clone, Debug)]
pub struct Libraries {
    directory: PathBuf,
}

impl Libraries {
    /// Returns the library that must be loaded before all others.
    #[must_use]
    pub fn preload(&self) -> PathBuf {
        self.directory.join("librdmacm.so.1")
    }

    /// Returns the two libraries that must be loaded before all others, so that rdma-core's own
    /// librdmacm runs above softrdma and the program's sockets are rsockets.
    pub fn rsockets(&self) -> Result<[PathBuf; 2], Error> {
        let file = "rsocket/librspreload.so";
        let sockets = system_directories().map(|directory| directory.join(file)).find(|path| path.exists());
        let sockets = sockets.ok_or(Error::Rsockets)?;
        Ok([self.directory.join("libibverbs-softrdma.so"), sockets])
    }

    /// Returns the directory to search for libraries if the real ones are not installed.
    #[must_use]
    pub fn search(&self) -> &Path {
        &self.directory
    }
}

/// Whether the machine has rdma-core's libibverbs, which providers' libraries need besides ours.
#[must_use]
pub fn has_rdma_core() -> bool {
    system_directories().any(|directory| directory.join("libibverbs.so.1").exists())
}

/// Returns the directories in which a machine may have its libraries.
fn system_directories() -> impl Iterator<Item = PathBuf> {
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    let of_triple = [format!("/lib/{triple}"), format!("/usr/lib/{triple}")];
    let directories = ["/lib64".into(), "/usr/lib64".into(), "/usr/lib".into(), "/lib".into()];
    directories.into_iter().chain(of_triple).map(PathBuf::from)
}
