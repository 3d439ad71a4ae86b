//! What runs in order without being waited for: streams, the events that mark places in them, and graphs.
//!
//! On the emulator everything is done by the time it is enqueued, and no event has a time.

use std::sync::{Mutex, PoisonError};

use super::{Buffer, Command, Device, DeviceError, Handle, Launch};

/// Commands that run one after another, beside those of other streams.
pub struct Stream {
    device: Device,
    handle: Handle,
    /// What was enqueued last, which is what an error is likeliest about.
    last: Mutex<String>,
}

/// A place in a stream.
pub struct Event {
    device: Device,
    handle: Handle,
}

/// Commands recorded once and replayed in order. What changes from replay to replay is read from device words.
pub struct Graph {
    device: Device,
    recorded: Option<Handle>,
    commands: Vec<Command>,
}

impl Device {
    /// A new stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        let handle = self.0.open_stream().map_err(|reason| failed("opening a stream", reason))?;
        Ok(Stream { device: self.clone(), handle, last: Mutex::default() })
    }

    /// Records launches, fills and copies, to be replayed in this order.
    ///
    /// # Errors
    /// A command that does not fit, by name; what the driver says.
    ///
    /// # Safety
    /// As for [`Device::launch`], for every launch and every replay.
    pub unsafe fn record<C: Into<Command>>(&self, commands: impl IntoIterator<Item = C>) -> Result<Graph, DeviceError> {
        let commands: Vec<Command> = commands.into_iter().map(Into::into).collect();
        commands.iter().try_for_each(|command| command.check(self))?;
        // SAFETY: the caller vouches for every replay; the graph owns the commands, and they the buffers.
        let recorded = unsafe { self.0.record(&commands) }?;
        Ok(Graph { device: self.clone(), recorded, commands })
    }
}

fn failed(what: &str, reason: String) -> DeviceError {
    DeviceError::Launch { launch: what.into(), reason }
}

impl Stream {
    fn remember(&self, what: String) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }

    /// Enqueues a command. Buffers may be dropped at once: their memory waits for the device.
    ///
    /// # Errors
    /// A command that does not fit; what the driver, or the emulator, says.
    ///
    /// # Safety
    /// As for [`Device::launch`]. What another stream writes or reads meanwhile is ordered by events alone.
    pub unsafe fn enqueue(&self, command: &Command) -> Result<(), DeviceError> {
        command.check(&self.device)?;
        self.remember(command.describe());
        // SAFETY: passed on; memory is released only after the device is idle.
        unsafe { self.device.0.enqueue(self.handle, command) }
    }

    /// [`Stream::enqueue`] of a kernel.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        // SAFETY: passed on.
        unsafe { self.enqueue(&Command::Launch(launch.clone())) }
    }

    /// Enqueues a fill of a whole buffer.
    ///
    /// # Errors
    /// As for [`Stream::enqueue`].
    pub fn fill(&self, buffer: &Buffer, byte: u8) -> Result<(), DeviceError> {
        let command = Command::Fill { buffer: buffer.clone(), offset: 0, bytes: buffer.bytes(), byte };
        // SAFETY: not a kernel; ranges are checked.
        unsafe { self.enqueue(&command) }
    }

    /// Enqueues a replay of a graph.
    ///
    /// # Errors
    /// A graph of another device; what the driver, or the emulator, says.
    pub fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        if !graph.device.same(&self.device) {
            return Err(failed(&graph.describe(), "it was recorded on another device".into()));
        }
        self.remember(graph.describe());
        graph.enqueue(self.handle)
    }

    /// An event that happens when all that was enqueued so far is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn event(&self) -> Result<Event, DeviceError> {
        let handle = self.device.0.record_event(self.handle).map_err(|reason| failed("recording an event", reason))?;
        Ok(Event { device: self.device.clone(), handle })
    }

    /// Holds back what is enqueued from now on until the event, of any stream of this device, has happened.
    ///
    /// # Errors
    /// An event of another device; what the driver says.
    pub fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        if !event.device.same(&self.device) {
            return Err(failed("waiting for an event", "it belongs to another device".into()));
        }
        let done = self.device.0.wait_event(self.handle, event.handle);
        done.map_err(|reason| failed("waiting for an event", reason))
    }

    /// Waits until all that was enqueued is done.
    ///
    /// # Errors
    /// What went wrong since the last time, with the name of what was enqueued last.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.device.0.wait(self.handle).map_err(|reason| {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            failed(&format!("a stream whose last command is {last}"), reason)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.device.0.close_stream(self.handle);
    }
}

impl Event {
    /// Whether it has happened.
    ///
    /// # Errors
    /// What went wrong before it.
    pub fn done(&self) -> Result<bool, DeviceError> {
        self.device.0.event_done(self.handle).map_err(|reason| failed("an event", reason))
    }

    /// Milliseconds from `earlier` to this event, both of which have happened; `None` on the emulator.
    ///
    /// # Errors
    /// An event of another device; one that has not happened.
    pub fn ms_since(&self, earlier: &Event) -> Result<Option<f64>, DeviceError> {
        if !earlier.device.same(&self.device) {
            return Err(failed("the time between two events", "they belong to different devices".into()));
        }
        let ms = self.device.0.event_ms(earlier.handle, self.handle);
        ms.map_err(|reason| failed("the time between two events", reason))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.0.close_event(self.handle);
    }
}

impl Graph {
    /// How many launches one replay is; fills and copies are not launches.
    pub fn launches(&self) -> usize {
        self.commands.iter().filter(|command| matches!(command, Command::Launch(_))).count()
    }

    /// What one replay does, in order.
    pub fn commands(&self) -> &[Command] {
        &self.commands
    }

    /// As errors name it: how long it is, and its first and last command.
    fn describe(&self) -> String {
        let ends = match self.commands.as_slice() {
            [] => String::new(),
            [only] => format!(" ({})", only.describe()),
            [first, .., last] => format!(" ({} ... {})", first.describe(), last.describe()),
        };
        format!("a graph of {} commands{ends}", self.commands.len())
    }

    fn enqueue(&self, stream: Handle) -> Result<(), DeviceError> {
        match self.recorded {
            Some(graph) => self.device.0.replay(stream, graph).map_err(|reason| failed(&self.describe(), reason)),
            // SAFETY: vouched for when they were recorded.
            None => self.commands.iter().try_for_each(|command| unsafe { self.device.0.enqueue(stream, command) }),
        }
    }

    /// Runs the commands in order and waits for the last.
    ///
    /// # Errors
    /// What the driver, or the emulator, says.
    pub fn replay(&self) -> Result<(), DeviceError> {
        self.enqueue(0)?;
        self.device.0.wait(0).map_err(|reason| failed(&self.describe(), reason))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(graph) = self.recorded {
            self.device.0.close_graph(graph);
        }
    }
}
