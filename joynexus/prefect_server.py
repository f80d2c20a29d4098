"""Prefect's command line over a sqlite database whose writers queue up.

Prefect begins most of its writing transactions as DEFERRED. In sqlite's write-ahead log such a transaction cannot
become a writer once another one has committed since its first read: it fails at once with "database is locked",
whatever the busy time-out, and the server answers 503 (https://www.sqlite.org/lang_transaction.html, section 2.2).
While a few tenants trained this refused two of three attempts to start a flow run. Begun as IMMEDIATE they wait for
each other instead. Only the server's process is run this way: `python -m joynexus.prefect_server server start`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefect.cli import app
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.server.utilities.database import get_dialect
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


class QueuedWriters(AioSqliteConfiguration):
    """Prefect's sqlite configuration, with the write lock taken when a transaction begins."""

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        """Begin a transaction that may write."""
        async with session.begin() as transaction:
            # For this connection alone: others opened meanwhile may only read, and must not wait for the lock.
            token = SQLITE_BEGIN_MODE.set("IMMEDIATE")
            try:
                await session.connection()
            finally:
                SQLITE_BEGIN_MODE.reset(token)
            yield transaction


def main() -> None:
    """Run Prefect's command line; a database other than sqlite is left as it is."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url is not None and get_dialect(url).name == "sqlite":
        set_database_config(QueuedWriters(connection_url=url))
    app()


if __name__ == "__main__":
    main()
