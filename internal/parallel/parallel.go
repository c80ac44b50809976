// Package parallel turns a list of jobs into the work of a few goroutines.
package parallel

import (
	"cmp"
	"sync"
	"sync/atomic"
)

// Each runs jobs 0 to n-1, in their order, on the given number of workers, at least one; start
// makes what one worker keeps between jobs. It ends at an error. The jobs before the one that
// failed were taken before it, so that the error comes from the first job that fails, whoever was
// faster.
func Each(workers, n int, start func() func(i int) error) error {
	var (
		next   atomic.Int64
		failed atomic.Bool
		wg     sync.WaitGroup
		errs   = make([]error, n)
	)
	for range min(max(1, workers), n) {
		wg.Go(func() {
			run := start()
			for !failed.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if errs[i] = run(i); errs[i] != nil {
					failed.Store(true)
				}
			}
		})
	}
	wg.Wait()
	return cmp.Or(errs...) // the first
}
