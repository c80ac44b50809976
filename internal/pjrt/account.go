package pjrt

import "sync/atomic"

// ledger counts the bytes that are in use on a device: buffers that live, and the temporary
// memory of runs that have not been waited for.
type ledger struct {
	live atomic.Int64
	peak atomic.Int64
}

func (d *Device) account(delta int64) {
	now := d.ledger.live.Add(delta)
	for {
		peak := d.ledger.peak.Load()
		if now <= peak || d.ledger.peak.CompareAndSwap(peak, now) {
			return
		}
	}
}

// LiveBytes is what buffers and running programs hold on the device now, by our own count.
func (d *Device) LiveBytes() int64 { return d.ledger.live.Load() }

// HighWater is the most that LiveBytes has been since the last ResetHighWater.
func (d *Device) HighWater() int64 { return d.ledger.peak.Load() }

// ResetHighWater makes the high-water mark begin again at what is live now.
func (d *Device) ResetHighWater() { d.ledger.peak.Store(d.ledger.live.Load()) }
