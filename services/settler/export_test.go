package settler

import "time"

// SetSession shortens the catch-up reader's sessions. Call it before Run.
func (s *Service) SetSession(d time.Duration) { s.session = d }
